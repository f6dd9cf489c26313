"""Choose the device to compute on."""

from __future__ import annotations

import os

import torch

from protosteer.errors import SettingsError
from protosteer.util.distributed import check_cuda_device


def choose_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()  # a device such as meta has memory, but nothing in it
    except (RuntimeError, AssertionError) as error:  # torch raises either, by device
        is_known = name.partition(":")[0] in ("cuda", "mps")
        message = f"device {name!r} is not available: torch finds no such device here; use cpu or auto"
        if not is_known:
            message = f"device {name!r} is unknown or cannot compute; choose auto, cpu, cuda or mps"
        raise SettingsError(message, code="no-such-device", device=name) from error
    if device.type == "cuda":
        check_cuda_device()
        # Some kernels give other bits each time unless told not to.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return device
