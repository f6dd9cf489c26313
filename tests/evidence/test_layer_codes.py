"""Prototypes in earlier layers: their 4-bit codes, and tables of them."""

import pytest
import torch
import torch.nn.functional as F

from protosteer.evidence.prototype_summary import (
    EXACT_PROTOTYPES,
    MAX_PROTOTYPES,
    decode_layers,
    encode_layers,
    summarise_class,
)
from protosteer.evidence.summary_table import SummaryTable

SPACES = 4


def features(count: int, seed: int = 0, dim: int = 48) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    centre = torch.randn(1, SPACES, dim, generator=draw)
    return F.normalize(centre + 0.7 * torch.randn(count, SPACES, dim, generator=draw), dim=2)


@pytest.mark.parametrize("dim", [7, 48])
def test_codes_are_near_their_vectors_and_depend_on_nothing_else(dim):
    vectors = features(20, dim=dim)
    codes = encode_layers(vectors)
    assert codes.codes.shape == (20, SPACES, -(-dim // 2)) and codes.codes.dtype == torch.uint8
    decoded = decode_layers(codes, dim)
    # The mean square error of 16 even levels for normal numbers is 1.2 % (Max 1960).
    assert float((decoded - vectors).square().sum(dim=2).mean()) < 0.02
    alone = decode_layers(encode_layers(vectors[3:4]), dim)
    torch.testing.assert_close(alone[0], decoded[3])
    assert torch.equal(encode_layers(vectors[3:4]).codes[0], codes.codes[3])


def test_an_outlying_dimension_does_not_drown_the_others():
    vectors = features(50)
    vectors[..., 5] = 3.0
    units = F.normalize(vectors, dim=2)
    assert float((decode_layers(encode_layers(units), 48) - units).norm(dim=2).mean()) < 0.25


def test_zero_vectors_are_coded():
    assert decode_layers(encode_layers(torch.zeros(2, SPACES, 8)), 8).isfinite().all()


def test_groups_are_offsets_from_the_single_images():
    """So that they are finer than single images, and the class mean survives."""
    images = features(200)
    summary = summarise_class(images, seed=3)
    table = SummaryTable.of([summarise_class(features(5, seed=1)), summary])
    assert summary.num_exact == EXACT_PROTOTYPES and len(summary.counts) == MAX_PROTOTYPES
    rows = torch.arange(5, 5 + MAX_PROTOTYPES)
    for space in range(SPACES):
        points = table.decoded(rows, space)
        nearest = torch.cdist(points[:EXACT_PROTOTYPES], images[:, space]).amin(dim=1)
        assert float(nearest.max()) < 0.2
        mean = (points * summary.counts[:, None]).sum(dim=0) / summary.counts.sum()
        assert float((mean - images[:, space].mean(dim=0)).norm()) < 0.03


def test_rows_of_a_table_are_decoded_one_by_one_as_together():
    table = SummaryTable.of([summarise_class(features(n, seed=n), seed=n) for n in (3, 60, 1, 40)])
    order = torch.tensor([3, 0, 1])
    taken = table.take(order)
    again = SummaryTable.concatenate([table.take(torch.tensor([i])) for i in order.tolist()])
    for space in range(SPACES):
        whole = taken.decoded(space=space)
        torch.testing.assert_close(again.decoded(space=space), whole)
        for row in (0, 9, 40, len(whole) - 1):
            torch.testing.assert_close(taken.decoded(torch.tensor([row]), space)[0], whole[row])


def test_a_table_reads_the_last_layer_where_a_summary_has_no_other():
    narrow = summarise_class(features(4)[:, 0])
    wide = summarise_class(features(4))
    assert torch.equal(narrow.points, wide.points) and narrow.layers is None
    tables = [SummaryTable.of([one]) for one in (narrow, wide)]
    assert [table.spaces for table in tables] == [1, SPACES]
    assert SummaryTable.concatenate(tables).spaces == SummaryTable.of([narrow, wide]).spaces == 1
