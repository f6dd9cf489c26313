"""The precision of forward passes: "fp32", "bf16", or "auto", which depends on the hardware."""

from __future__ import annotations

import os

import torch

from protosteer.errors import SettingsError
from protosteer.util.system import cpu_has_bf16

AUTO_PRECISION, FP32, BF16 = PRECISIONS = ("auto", "fp32", "bf16")
VARIABLE = "PROTOSTEER_PRECISION"  # of the environment: what `auto` means in this process and those it starts


def check_precision(name: str, place: str = "precision") -> str:
    """Return the name of a precision; raise `SettingsError` if there is none of that name."""
    if name not in PRECISIONS:
        message = f"{place} = {name!r}: choose one of {', '.join(PRECISIONS)}"
        raise SettingsError(message, code="bad-setting", name=place)
    return name


def auto_precision(device: torch.device) -> str:
    """Resolve `auto` on a device: bf16 if the hardware computes in it, else fp32."""
    name = check_precision(os.environ.get(VARIABLE, AUTO_PRECISION), VARIABLE)
    if name != AUTO_PRECISION:
        return name
    if device.type == "cuda":
        return BF16 if torch.cuda.is_bf16_supported() else FP32
    return BF16 if device.type == "cpu" and cpu_has_bf16() else FP32
