"""Class summaries: what the default classifier stores of a class, as unit vectors of 8 bits, or 4 in earlier layers.

Up to `MAX_PROTOTYPES` images are stored one by one (25 kB in six layers of width 192). Of more images,
`EXACT_PROTOTYPES` are stored one by one and the others as k-means groups. Scores are calibrated by images that are
stored one by one, because their leave-one-out scores are exact.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.paper.prototypes import centroids, check_embeddings

MAX_PROTOTYPES = 34  # per class
MAX_PAIRED_PROTOTYPES = 27  # per class and summary where a class has two: without and under the shared prompt
EXACT_PROTOTYPES = 8  # of these, single images
MAX_EXACT_PROTOTYPES = 10  # the same in files of earlier versions


@dataclass(frozen=True)
class LayerCodes:
    """P prototypes in the S - 1 feature spaces of earlier layers, two 4-bit numbers to a byte: see `encode_layers`.

    Groups of images are coded as offsets from the mean of their class's single images.
    """

    codes: Tensor  # uint8 [P, S - 1, ceil(D / 2)]
    steps: Tensor  # half [P, S - 1]

    def __getitem__(self, rows: Any) -> LayerCodes:
        return LayerCodes(self.codes[rows], self.steps[rows])


@dataclass(frozen=True)
class ClassSummary:
    """Prototypes of one class as unit vectors, in one feature space or several.

    A prototype is a multiple of -127 to 127 of its own scale. Scales and deviations are numbers that half
    precision holds, so that a file needs eight bits per number.
    """

    points: Tensor  # [k, D]
    counts: Tensor  # int64 [k]: images behind each
    deviations: Tensor  # [D]: root mean square distance of images to their prototypes, per dimension
    layers: LayerCodes | None = None  # the same prototypes in earlier layers

    @property
    def num_exact(self) -> int:
        """How many prototypes are single images; they come first, the same images in every feature space."""
        is_exact = len(self.points) == int(self.counts.sum())
        return len(self.points) if is_exact else min(MAX_EXACT_PROTOTYPES, int((self.counts == 1).cumprod(0).sum()))


def summarise_class(embeddings: Tensor, seed: int = 0, limit: int = MAX_PROTOTYPES) -> ClassSummary:
    """Summarise one class's embeddings, [n, D] or [n, S, D] of S layers, by at most `limit` prototypes.

    The same seed gives the same summary.
    """
    spaces = embeddings.shape[1] if embeddings.ndim == 3 else 1
    vectors = torch.from_numpy(check_embeddings(embeddings.flatten(1))).unflatten(1, (spaces, -1))
    units = F.normalize(vectors, dim=2).float()  # [n, S, D]
    exact = torch.zeros(len(units), dtype=torch.bool).index_fill_(0, exact_rows(len(units), seed, limit), True)
    images, image_counts = units[exact], torch.ones(int(exact.sum()), dtype=torch.int64)
    codes = encode_layers(images[:, 1:]) if spaces > 1 else None
    if exact.all():
        return ClassSummary(quantize_int8(images[:, 0]), image_counts, torch.zeros(units.shape[2]), codes)
    groups = centroids(units[~exact].flatten(1), limit - EXACT_PROTOTYPES, "kmeans", seed=seed % 2**32)
    # The largest group comes first, so that a group of one image does not follow the single images.
    order = groups.counts.argsort(descending=True, stable=True)
    means, counts = groups.means[order].unflatten(1, (spaces, -1)), groups.counts[order]
    if codes is not None:
        offsets = encode_layers(means[:, 1:] - decode_layers(codes, units.shape[2]).mean(dim=0))
        codes = LayerCodes(torch.cat([codes.codes, offsets.codes]), torch.cat([codes.steps, offsets.steps]))
    variances = (groups.deviations**2 * groups.counts[:, None]).sum(dim=0)[: units.shape[2]] / len(units)
    points = quantize_int8(torch.cat([images, means])[:, 0])
    return ClassSummary(points, torch.cat([image_counts, counts]), round_to_half(variances.sqrt()), codes)


def exact_rows(count: int, seed: int, limit: int = MAX_PROTOTYPES) -> Tensor:
    """Return the rows, ascending, of the images that a summary of `count` images by `limit` prototypes stores one by one."""
    if count <= limit:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:EXACT_PROTOTYPES].sort().values


_LEVELS = 16
_STEP = 0.3352  # of 16 even levels for a normal distribution of deviation 1, with the least mean square error


def encode_layers(vectors: Tensor) -> LayerCodes:
    """Code vectors [k, S, D] in 4 bits; a code depends on its own vector alone.

    A cosine transform first spreads outlying dimensions over all others, so that even levels fit every backbone. The
    step is the least-squares one.
    """
    rotated = vectors.double() @ _cosine_transform(vectors.shape[2]).T
    spread = rotated.square().mean(dim=2, keepdim=True).sqrt().clamp(min=1e-12)
    numbers = (rotated / (_STEP * spread)).floor().clamp(-_LEVELS // 2, _LEVELS // 2 - 1)
    levels = numbers + 0.5
    steps = (rotated * levels).sum(dim=2) / levels.square().sum(dim=2)
    nibbles = F.pad((numbers + _LEVELS // 2).to(torch.uint8), (0, vectors.shape[2] % 2))
    return LayerCodes(nibbles[..., 0::2] * _LEVELS + nibbles[..., 1::2], steps.half())


def decode_layers(layers: LayerCodes, dim: int) -> Tensor:
    """Decode the result of `encode_layers`: float32 [P, S - 1, dim]."""
    numbers = torch.stack([layers.codes // _LEVELS, layers.codes % _LEVELS], dim=-1).flatten(2)[..., :dim]
    levels = (numbers.float() + (0.5 - _LEVELS // 2)) * layers.steps.float()[..., None]
    return levels @ _cosine_transform(dim).float()


@functools.lru_cache(maxsize=4)
def _cosine_transform(dim: int) -> Tensor:
    """Return the orthonormal cosine transform of type II, double [dim, dim]."""
    places = torch.arange(dim, dtype=torch.double)
    matrix = torch.cos(math.pi / dim * places[:, None] * (places + 0.5)) * math.sqrt(2 / dim)
    matrix[0] /= math.sqrt(2)
    return matrix


def pack_prototypes(points: Tensor) -> dict[str, Tensor]:
    """Return the columns of prototypes [k, D] in a file: int8 codes and scales if these are exact."""
    scales = _scales(points)
    codes = _codes(points, scales)
    if not torch.equal(codes * scales, points):  # not made by `quantize_int8`
        return {"points": half_if_lossless(points)}
    return {"points": codes.to(torch.int8), "steps": scales[:, 0].half()}


def unpack_prototypes(points: Tensor, scales: Tensor | None) -> Tensor:
    """Return the prototypes [k, D] of `pack_prototypes`, in single precision."""
    if points.dtype != torch.int8 or scales is None:
        return points.float()
    return points.float() * scales.float()[:, None]


def quantize_int8(points: Tensor) -> Tensor:
    """Round each row of [k, D] to multiples, at most 127, of a scale of its own."""
    scales = _scales(points)
    return _codes(points, scales) * scales


def round_to_half(numbers: Tensor) -> Tensor:
    """Round to numbers that half precision holds, in single precision."""
    return numbers.half().float()


def half_if_lossless(numbers: Tensor) -> Tensor:
    """Convert to half precision if that changes no number."""
    lossless = numbers.dtype == torch.half or torch.equal(round_to_half(numbers), numbers)
    return numbers.half() if lossless else numbers


def _scales(points: Tensor) -> Tensor:
    """Return a scale per row of [k, D], [k, 1], in half precision: 127 times a scale is exact, so it is found again."""
    return round_to_half(points.abs().amax(dim=1, keepdim=True) / 127)


def _codes(points: Tensor, scales: Tensor) -> Tensor:
    return (points / scales).nan_to_num(0.0).round().clamp(-127, 127)
