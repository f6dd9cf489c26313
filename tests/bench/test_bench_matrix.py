"""Both protocols of the matrix benchmark give one matrix."""

from __future__ import annotations

import pytest

from protosteer.bench import matrix
from vit_toys import small

pytestmark = pytest.mark.slow


def test_both_protocols_give_one_matrix_and_ours_makes_nothing_else(monkeypatch):
    for name, value in {"vit_tiny": small, "TASKS": 5, "CLASSES": 3, "IMAGES": 12}.items():
        monkeypatch.setattr(matrix, name, value)
    case = small(), *matrix.subjects(small(), 5, 3, 12)
    run = matrix.our_run(*case)
    assert matrix.naive_matrix(*case) == run.matrix
    assert len({accuracy for row in run.matrix for accuracy in row}) > 3  # equality means something
    assert run.diagnosis is None and run.diagnosis_passes == 0
    figures, (ratio,) = run.figures(), matrix.run(2)
    assert figures["retrieval_accuracy"] == 100.0
    assert figures["naive_forward_passes"] > figures["forward_passes"]
    assert (ratio.name, ratio.target, len(ratio.ours)) == ("matrix", 3.0, 2)
    passes = "forward passes: {forward_passes:,}, naive {naive_forward_passes:,}"
    assert ratio.notes == [passes.format(**figures)]
