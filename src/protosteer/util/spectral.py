"""Spectral clustering of many points in O(n D) memory: the n x n affinity exists only as a product of n x D factors.

scikit-learn builds that matrix and factorises it, which grows as n² and n³. This takes the same eigenvectors and the
same label assignment in a time that grows with n.
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

DEGREE_FLOOR = 1e-3  # mean similarity to the others below which a row has no usable degree
ROTATIONS = 20  # scikit-learn's bound on the alternation; most data settle earlier

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


def unit_rows(points: Floats) -> Floats:
    """Scale the rows of [n, D] to length 1; a row of zeros stays zero, similar to nothing."""
    norms = np.linalg.norm(points, axis=1, keepdims=True)
    units: Floats = points / np.where(norms > 0, norms, 1.0)
    return units


def factored_labels(points: Floats, count: int, assign: str, seed: int) -> Labels:
    """Cluster points [n, D] into `count` groups by cosine similarity: labels [n].

    Similarities are **not clipped** at 0, since clipping needs each pair. Without negative similarities the result is
    that of scikit-learn with the n x n matrix, up to rounding. That is the usual case: embeddings of one class lie in
    one cone. With a few negative pairs in ten thousand, points on the border of two groups change sides, and where
    groups are vague "discretize" may settle elsewhere, as it does for another seed. Points in opposite directions all
    over are separated by clipping alone: there the results really differ (`_factor` keeps degrees positive).

    Random numbers are drawn in scikit-learn's order (start of the eigensolver, then label assignment), so that a seed
    leads both into the same local optimum.
    """
    factor, diagonal, degrees = _factor(unit_rows(points))
    random = np.random.RandomState(seed)
    start = random.uniform(-1, 1, len(points))
    vectors = _leading_vectors(factor, diagonal, degrees, count, start)
    if assign == "kmeans":
        from sklearn.cluster import KMeans

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fewer groups than asked for are fine
            labels: Labels = KMeans(count, n_init=10, random_state=random).fit_predict(vectors)
        return labels
    return _discretize(vectors, random.randint(len(vectors)))


def _factor(units: Floats) -> tuple[Floats, Floats, Floats]:
    """Return B [n,k] with affinity BBᵀ, that affinity's diagonal [n], and its row sums without it: the degrees [n].

    A degree must be positive. Where a point is on average unlike the others (possible only without
    clipping), all similarities s are replaced by (1 + s) / 2, never negative and one column wider.
    """
    diagonal = np.einsum("nd,nd->n", units, units)
    factor, degrees = units, units @ units.sum(axis=0) - diagonal
    if degrees.min() <= DEGREE_FLOOR * (len(units) - 1):
        factor = np.hstack([units, np.ones((len(units), 1))]) / np.sqrt(2.0)
        diagonal = (1 + diagonal) / 2
        degrees = factor @ factor.sum(axis=0) - diagonal
    # (1 + s) / 2 still vanishes for a point opposite to all others
    return factor, diagonal, np.maximum(degrees, DEGREE_FLOOR)


def _leading_vectors(factor: Floats, diagonal: Floats, degrees: Floats, count: int, start: Floats) -> Floats:
    """Compute the generalised eigenvectors [n,count] of the normalised graph Laplacian with the smallest eigenvalues.

    They are the largest of D^-1/2 (BBᵀ - diagonal) D^-1/2. Without the diagonal term an eigenproblem of
    size k x k would do, but points on the border of two groups would move. Lanczos keeps the term and
    needs just some dozens of products with B.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh
    from threadpoolctl import threadpool_limits

    roots = np.sqrt(degrees)

    def multiply(vector: Floats) -> Floats:
        inner = vector.ravel() / roots
        product: Floats = (factor @ (inner @ factor) - diagonal * inner) / roots
        return product

    shape = (len(factor), len(factor))
    operator = LinearOperator(shape, matvec=multiply, dtype=np.float64)
    # many short products, each of which would wait for its slowest thread: on a busy machine two threads
    # take two to four times as long as one, and the last bits would depend on their number
    with threadpool_limits(1, user_api="blas"):
        _, vectors = eigsh(operator, count, which="LA", v0=start)
    result: Floats = vectors / roots[:, None]
    return result


def _discretize(vectors: Floats, start_row: int) -> Labels:
    """Find the partition nearest to a rotation of the eigenvectors [n,c] (Yu & Shi, 2003).

    Eigenvectors are determined up to a rotation R. For given R each row of VR joins the axis on which it
    is longest; for given groups the best R is a Procrustes problem: with the sums M = LᵀV [c,c] of the
    groups' rows and M = A S Bᵀ, R = BAᵀ maximises trace(MR). Both steps raise the same objective.
    """
    rows = unit_rows(vectors / np.linalg.norm(vectors, axis=0))
    rotation = _spread_rows(rows, start_row)
    groups = rotation.shape[1]
    labels: Labels = (rows @ rotation).argmax(axis=1)
    for _ in range(ROTATIONS):
        sums = np.stack([np.bincount(labels, column, groups) for column in rows.T], axis=1)
        left_vectors, _, right_vectors = np.linalg.svd(sums)
        old_labels, labels = labels, (rows @ (left_vectors @ right_vectors).T).argmax(axis=1)
        if np.array_equal(old_labels, labels):
            break
    return labels


def _spread_rows(rows: Floats, start_row: int) -> Floats:
    """Return row `start_row` and c - 1 more rows as columns, each as orthogonal as possible to the earlier ones."""
    selection = [rows[start_row]]
    overlap = np.zeros(len(rows))
    while len(selection) < rows.shape[1]:
        overlap += np.abs(rows @ selection[-1])
        selection.append(rows[overlap.argmin()])
    return np.stack(selection, axis=1)
