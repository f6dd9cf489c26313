"""Both protocols of the matrix benchmark give one matrix."""

from __future__ import annotations

import pytest

from protosteer.bench import matrix
from protosteer.bench.subjects import small

pytestmark = pytest.mark.slow


def subjects():
    backbone = small()
    return backbone, *matrix.subjects(backbone, tasks=5, classes=3, images=12)


def test_the_naive_matrix_equals_ours():
    backbone, memory, stream = subjects()
    ours = matrix.our_run(backbone, memory, stream).matrix
    assert matrix.naive_matrix(backbone, memory, stream) == ours
    assert ours[0] == [100.0]
    assert len({accuracy for row in ours for accuracy in row}) > 3  # equality means something


def test_our_side_makes_the_matrix_and_nothing_else():
    backbone, memory, stream = subjects()
    run = matrix.our_run(backbone, memory, stream)
    assert run.diagnosis is None and run.diagnosis_passes == 0
    assert run.figures()["retrieval_accuracy"] == 100.0
    assert run.figures()["naive_forward_passes"] > run.figures()["forward_passes"]


def test_the_ratio_names_both_numbers_of_passes():
    backbone, memory, stream = subjects()
    ratio = matrix.measure(backbone, memory, stream, repeats=2)
    figures = matrix.our_run(backbone, memory, stream).figures()
    assert (ratio.name, ratio.target) == ("matrix", 3.0)
    passes = f"forward passes: {figures['forward_passes']:,}, naive {figures['naive_forward_passes']:,}"
    assert ratio.notes == [passes]
