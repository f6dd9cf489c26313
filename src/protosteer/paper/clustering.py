"""Groups of one class's embeddings: spectral clustering by cosine similarity, or k-means.

scikit-learn does the spectral clustering of ordinary classes. Its n x n matrix and the factorisation of it
grow as n² and n³, so large classes take `factored_labels`, which only multiplies by the n x D embeddings:
same eigenvectors, same label assignment, a time that grows with n.

scikit-learn and scipy are imported where they are used: whoever only predicts or forgets need not wait for
them.
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

DENSE_LIMIT = 1500  # images of one class up to which the n x n affinity is built
SIMILARITY_FLOOR = 1e-8  # affinities must not be negative
DEGREE_FLOOR = 1e-3  # mean similarity to the others below which a row has no usable degree
ROTATIONS = 20  # scikit-learn's bound on the alternation; most data settle earlier

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


def group_labels(points: Floats, count: int, method: str, assign: str, seed: int) -> Labels:
    """The group of each row of `points` [n, D], of which more than `count` differ."""
    if count == 1:
        return np.zeros(len(points), dtype=np.int64)
    if method == "kmeans":
        return kmeans_labels(points, count, seed)
    if len(points) <= DENSE_LIMIT:
        return dense_labels(points, count, assign, seed)
    return factored_labels(points, count, assign, seed)


def kmeans_labels(points: Floats, count: int, seed: int | np.random.RandomState) -> Labels:
    from sklearn.cluster import KMeans

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fewer groups than asked for is an answer, not an alarm
        labels: Labels = KMeans(count, n_init=10, random_state=seed).fit_predict(points)
    return labels


def _directions(points: Floats) -> Floats:
    """Rows of length 1; an all-zero embedding has no direction and stays zero, similar to nothing."""
    norms = np.linalg.norm(points, axis=1, keepdims=True)
    units: Floats = points / np.where(norms > 0, norms, 1.0)
    return units


def dense_labels(points: Floats, count: int, assign: str, seed: int) -> Labels:
    from sklearn.cluster import SpectralClustering

    units = _directions(points)
    affinity = np.maximum(units @ units.T, SIMILARITY_FLOOR)
    clustering = SpectralClustering(count, affinity="precomputed", assign_labels=assign, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unconnected graphs and the like: groups are still well defined
        labels: Labels = clustering.fit_predict(affinity)
    return labels


def factored_labels(points: Floats, count: int, assign: str, seed: int) -> Labels:
    """Spectral clustering in O(nD) memory: the n x n affinity exists only as a product of n x D factors.

    Similarities are **not clipped** here, since clipping needs each pair. Without negative similarities
    the result is that of the dense path up to rounding; that is the usual case, as the embeddings of one
    class lie in one cone. With a few negative pairs in ten thousand, images on the border of two groups
    change sides, and where groups are vague "discretize" may settle elsewhere, as it does for another
    seed. Images that point in opposite directions all over are kept apart only by clipping: there the
    two paths really differ (and `_factor` takes care that degrees stay positive).

    The random numbers are drawn in the order in which the dense path draws them (start of the
    eigensolver, then label assignment), so that a seed leads both into the same local optimum.
    """
    factor, diagonal, degrees = _factor(_directions(points))
    random = np.random.RandomState(seed)
    start = random.uniform(-1, 1, len(points))
    vectors = _leading_vectors(factor, diagonal, degrees, count, start)
    if assign == "kmeans":
        return kmeans_labels(vectors, count, random)
    return _discretize(vectors, random.randint(len(vectors)))


def _factor(units: Floats) -> tuple[Floats, Floats, Floats]:
    """B [n,k] with affinity BBᵀ, that affinity's diagonal [n], and its row sums without it: the degrees [n].

    A degree must be positive. Where an image is on average unlike the others (possible only without
    clipping), all similarities s are replaced by (1 + s) / 2, never negative and one column wider.
    """
    diagonal = np.einsum("nd,nd->n", units, units)
    factor, degrees = units, units @ units.sum(axis=0) - diagonal
    if degrees.min() <= DEGREE_FLOOR * (len(units) - 1):
        factor = np.hstack([units, np.ones((len(units), 1))]) / np.sqrt(2.0)
        diagonal = (1 + diagonal) / 2
        degrees = factor @ factor.sum(axis=0) - diagonal
    # (1 + s) / 2 still vanishes for an image opposite to all others
    return factor, diagonal, np.maximum(degrees, DEGREE_FLOOR)


def _leading_vectors(factor: Floats, diagonal: Floats, degrees: Floats, count: int, start: Floats) -> Floats:
    """Generalised eigenvectors [n,count] of the normalised graph Laplacian, smallest eigenvalues.

    They are the largest of D^-1/2 (BBᵀ - diagonal) D^-1/2. Without the diagonal term an eigenproblem of
    size k x k would do, but images on the border of two groups would move. Lanczos keeps the term and
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


def _discretize(vectors: Floats, first: int) -> Labels:
    """The partition nearest to a rotation of the eigenvectors [n,c] (Yu & Shi, 2003).

    Eigenvectors are determined up to a rotation R. For given R each row of VR joins the axis on which it
    is longest; for given groups the best R is a Procrustes problem: with the sums M = LᵀV [c,c] of the
    groups' rows and M = A S Bᵀ, R = BAᵀ maximises trace(MR). Both steps raise the same objective.
    """
    rows = _directions(vectors / np.linalg.norm(vectors, axis=0))
    rotation = _spread_rows(rows, first)
    groups = rotation.shape[1]
    labels: Labels = (rows @ rotation).argmax(axis=1)
    for _ in range(ROTATIONS):
        sums = np.stack([np.bincount(labels, column, groups) for column in rows.T], axis=1)
        left, _, right = np.linalg.svd(sums)
        previous, labels = labels, (rows @ (left @ right).T).argmax(axis=1)
        if np.array_equal(previous, labels):
            break
    return labels


def _spread_rows(rows: Floats, first: int) -> Floats:
    """As columns, `first` and c - 1 more rows, each as orthogonal as can be to those already taken."""
    taken = [rows[first]]
    overlap = np.zeros(len(rows))
    while len(taken) < rows.shape[1]:
        overlap += np.abs(rows @ taken[-1])
        taken.append(rows[overlap.argmin()])
    return np.stack(taken, axis=1)
