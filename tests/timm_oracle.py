"""timm, which the package never imports, as the tests' oracle of a plain ViT."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

_OPERATORS: list[torch.library.Library] = []  # they exist only as long as the library does


def import_timm() -> Any:
    """timm's ViT module. It imports torchvision, which with CPU torch fails for want of two operators."""
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        _OPERATORS.append(library)
    from timm.models import vision_transformer

    return vision_transformer


def randomise(model: nn.Module, std: float = 0.2, seed: int = 0) -> None:
    """Every parameter away from its initial value, so that none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std
            scale = name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "gamma"))
            parameter.copy_(noise + 1 if scale else noise)


def timm_embedding(model: Any, images: Tensor) -> Tensor:
    with torch.no_grad():
        embedding: Tensor = model.eval().forward_head(model.forward_features(images), pre_logits=True)
    return embedding
