"""Initialise modules as torch does, but by a generator of their own instead of the process's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def seeded(make: Callable[[], M], generator: torch.Generator | None) -> M:
    """Create a module on the CPU whose linear layers are drawn by a generator, in torch's order and distribution.

    A generator in the state of torch's own gives the bits that `make()` would give. torch's own is neither read nor
    moved, so another thread may train at the same time.

    Args:
        make: Creates the module; its parameters are those of linear layers and layer norms.
        generator: The source of the weights; None: torch's own.
    """
    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.kaiming_uniform_(part.weight, a=math.sqrt(5), generator=generator)
            if part.bias is not None:
                bound = 1 / math.sqrt(part.in_features)
                nn.init.uniform_(part.bias, -bound, bound, generator=generator)
        elif isinstance(part, nn.LayerNorm):
            part.reset_parameters()
    return module
