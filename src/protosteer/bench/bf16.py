"""Prediction and training in bf16, against fp32: plain forward passes, and the naive training step."""

from __future__ import annotations

import torch

from protosteer.backbones.precision import AUTO_PRECISION, BF16, FP32
from protosteer.bench import prediction, training
from protosteer.bench.harness import Ratio, vit_tiny
from protosteer.util.system import cpu_has_bf16

TARGET = 1.7  # of prediction; that of a training step is as in fp32


def skip_reason(precision: str) -> str | None:
    """Return why bf16 is not measured, if `precision` is "fp32", or "auto" on hardware without bf16."""
    if precision == AUTO_PRECISION and not cpu_has_bf16():
        return "this processor has no bf16 instructions (AVX512-BF16 or AMX-BF16)"
    return "only fp32 is measured" if precision == FP32 else None


def run(repeats: int) -> list[Ratio]:
    """Measure a ViT-Ti."""
    predict = prediction.measure("predict_bf16", vit_tiny(), prediction.IMAGES, repeats, BF16, TARGET)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return predict + training.measure("training_step_bf16", vit_tiny(), training.BATCH, repeats, BF16)
