"""Convert arrays of any usual layout and number format to uint8 [N, 3, h, w]."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from protosteer.errors import DataError

ACCEPTED = "a path, a list of paths, PIL images, an array [N, 3, H, W] or a torch Dataset"


def batched(array: Any, name: str) -> Tensor:
    """Bring an array of any usual layout to [N, 3, h, w]."""
    if not isinstance(array, (Tensor, np.ndarray)):
        raise DataError(f"{name} is a {type(array).__name__}; give {ACCEPTED}", code="unsupported-data")
    shape = list(array.shape)
    is_numpy = isinstance(array, np.ndarray)
    x = array.detach().cpu() if isinstance(array, Tensor) else torch.from_numpy(_native(array, name))
    if x.ndim == 2:
        x = x[None, None]
    elif x.ndim == 3 and is_numpy and shape[2] in (1, 3):
        x = x.permute(2, 0, 1)[None]
    elif x.ndim == 3 and is_numpy and shape[0] == 3:
        message = f"{name} {shape} may be 1 colour or 3 grey images; use [1, 3, H, W] or [3, 1, H, W]"
        raise DataError(message, code="ambiguous-shape")
    elif x.ndim == 3 and is_numpy:
        x = x[:, None]
    elif x.ndim == 3 and shape[0] in (1, 3):
        x = x[None]
    elif x.ndim == 4 and shape[1] not in (1, 3) and shape[3] in (1, 3):
        x = x.permute(0, 3, 1, 2)
    if x.ndim != 4 or x.shape[1] not in (1, 3) or 0 in x.shape[2:]:
        raise DataError(
            f"{name} has shape {shape}; give [N, 3, H, W], or [N, 1, H, W] for grey images", code="bad-shape"
        )
    return x.expand(-1, 3, -1, -1)


def _native(array: np.ndarray, name: str) -> np.ndarray:
    """Return an array that torch accepts: no negative strides, native byte order; copy only if needed."""
    if array.dtype.kind not in "uif":
        raise DataError(f"{name} has dtype {array.dtype}; give uint8, or floats in [0, 1]", code="bad-dtype")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def to_uint8(x: Tensor, name: str) -> Tensor:
    """Convert pixel values, integers in 0..255 or floats in 0..1, to uint8 of the same shape."""
    if x.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise DataError(f"{name} has dtype {x.dtype}; give uint8, or floats in [0, 1]", code="bad-dtype")
    if x.dtype == torch.uint8 or not x.numel():
        return x.to(torch.uint8).contiguous()
    minimum, maximum = x.min().item(), x.max().item()
    if x.is_floating_point():
        if not (minimum >= 0 and maximum <= 1):  # also true of NaN
            raise DataError(
                f"{name} has floats from {minimum:.4g} to {maximum:.4g}; give pixel values, uint8 or in [0, 1] "
                "(normalised tensors go to Backbone.embed)",
                code="bad-pixel-range",
            )
        return (x * 255).round().to(torch.uint8).contiguous()
    if minimum < 0 or maximum > 255:
        message = f"{name} has {x.dtype} values from {minimum} to {maximum}; give uint8, or floats in [0, 1]"
        raise DataError(message, code="bad-pixel-range")
    return x.to(torch.uint8).contiguous()
