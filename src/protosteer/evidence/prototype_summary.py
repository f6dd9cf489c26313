"""Class summaries: what the default classifier stores of a class, as 8-bit unit vectors.

Up to `MAX_PROTOTYPES` images are stored one by one. Of more, `EXACT_PROTOTYPES` images are stored as they are and
the rest as k-means groups: the score of a stored image without itself is known exactly, which calibrates scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.paper.prototypes import centroids, check_embeddings

MAX_PROTOTYPES = 40  # per class
EXACT_PROTOTYPES = 10  # of these, images as they are


@dataclass(frozen=True)
class ClassSummary:
    """Prototypes of one class in one feature space, as unit vectors.

    A prototype is a multiple of -127 to 127 of its own scale. Scales and deviations are numbers that half
    precision holds, so that a file needs eight bits per number.

    points: [k, D]. counts: int64 [k], images behind each. deviations: [D], root mean square distance of images to
    their prototypes, per dimension.
    """

    points: Tensor
    counts: Tensor
    deviations: Tensor

    @property
    def num_exact(self) -> int:
        """How many prototypes are single images; they come first, the same images in every feature space."""
        few = len(self.points) == int(self.counts.sum())
        return len(self.points) if few else min(EXACT_PROTOTYPES, int((self.counts == 1).cumprod(0).sum()))


def summarise_class(embeddings: Tensor, seed: int = 0) -> ClassSummary:
    """Summarise one class's embeddings [n, D]; the same seed gives the same summary."""
    units = F.normalize(torch.from_numpy(check_embeddings(embeddings)), dim=1).float()
    if len(units) <= MAX_PROTOTYPES:
        ones = torch.ones(len(units), dtype=torch.int64)
        return ClassSummary(quantize_int8(units), ones, torch.zeros(units.shape[1]))
    exact = torch.zeros(len(units), dtype=torch.bool).index_fill_(0, exact_rows(len(units), seed), True)
    groups = centroids(units[~exact], MAX_PROTOTYPES - EXACT_PROTOTYPES, "kmeans", seed=seed % 2**32)
    ones = torch.ones(EXACT_PROTOTYPES, dtype=torch.int64)
    within = (groups.deviations**2 * groups.counts[:, None]).sum(dim=0) / len(units)
    return ClassSummary(
        quantize_int8(torch.cat([units[exact], groups.means])),
        torch.cat([ones, groups.counts]),
        round_to_half(within.sqrt()),
    )


def exact_rows(count: int, seed: int) -> Tensor:
    """Rows, ascending, of the images that a summary of `count` images stores one by one."""
    if count <= MAX_PROTOTYPES:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:EXACT_PROTOTYPES].sort().values


def pack_prototypes(points: Tensor) -> dict[str, Tensor]:
    """Prototypes [k, D] for a file: int8 codes and scales where that is exact."""
    scales = _scales(points)
    codes = _codes(points, scales)
    if not torch.equal(codes * scales, points):  # not made by `quantize_int8`
        return {"points": half_if_lossless(points)}
    return {"points": codes.to(torch.int8), "steps": scales[:, 0].half()}


def unpack_prototypes(points: Tensor, scales: Tensor | None) -> Tensor:
    """The inverse of `pack_prototypes`, in single precision."""
    if points.dtype != torch.int8 or scales is None:
        return points.float()
    return points.float() * scales.float()[:, None]


def quantize_int8(points: Tensor) -> Tensor:
    """Round each row of [k, D] to multiples, at most 127, of a scale of its own."""
    scales = _scales(points)
    return _codes(points, scales) * scales


def round_to_half(numbers: Tensor) -> Tensor:
    """Round to what half precision holds, and return single precision."""
    return numbers.half().float()


def half_if_lossless(numbers: Tensor) -> Tensor:
    """Convert to half precision if that changes no number."""
    lossless = numbers.dtype == torch.half or torch.equal(round_to_half(numbers), numbers)
    return numbers.half() if lossless else numbers


def _scales(points: Tensor) -> Tensor:
    """[k, 1], in half precision: 127 of them are exact, so that the same scale is found again."""
    return round_to_half(points.abs().amax(dim=1, keepdim=True) / 127)


def _codes(points: Tensor, scales: Tensor) -> Tensor:
    return (points / scales).nan_to_num(0.0).round().clamp(-127, 127)
