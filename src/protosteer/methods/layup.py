"""LayUP (Ahrens et al., TMLR 2024): ridge regression on the class tokens of the last layers.

The features of an image are its class tokens after each of the last k layers, side by side; `ridge.py` has the
regression on them. With mean pooling, a layer's patch mean takes the place of its class token. As in the authors' code,
tokens are taken as the layers return them, without a norm; `layer_norm` scales each to mean 0 and variance 1.

lambda is chosen again with every task, by cross-validation over its images in four stratified folds that all learn from
the sums of earlier tasks too: the value of the best accuracy, the first of equals. The values and their order are the
authors'. A class of fewer than four images is in fewer folds.

Before that, the backbone is adapted to the first task, by adapters unless `first_session` names another kind; the paper
also tries VPT and SSF (not here) and reports the best. Difference: its adaptation uses AdamW, a cosine head of scale 30
and early stopping on test images; here it is that of RanPAC and APER.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.backbones.prompting import Prompt
from protosteer.methods.base import Source, register_method
from protosteer.methods.first_session import FirstSessionSettings
from protosteer.methods.layer_tokens import LayerTokens
from protosteer.methods.ridge import Ridge, Spectrum, fold_accuracy
from protosteer.settings import setting

LAMBDAS = (*(10.0 ** (power / 2) for power in range(-8, 7)), 1e-8)
FOLDS = 4


@dataclass(frozen=True)
class LayUPSettings(FirstSessionSettings):
    """Settings of LayUP; defaults are the authors' (main.py of their code)."""

    first_session: str = "adapter"
    layers: int = setting(6, at_least=1, at_most=1000)  # k; all layers if the backbone has fewer
    layer_norm: bool = False


@register_method("layup")
class LayUP(Ridge):
    """Ridge regression on the class tokens of several layers."""

    source = Source(
        "Ahrens et al.",
        "Read between the layers: leveraging multi-layer representations for rehearsal-free continual learning with "
        "pre-trained models",
        "TMLR",
        2024,
    )
    settings_class = LayUPSettings
    published = dict.fromkeys(
        ("split-cifar100", "imagenet-r", "imagenet-a", "cub200", "omnibenchmark", "vtab", "cars"), {}
    )
    published_source = "main.py of the authors' code, the same for all; its rate is for AdamW, ours is that of APER"
    settings: LayUPSettings

    def __init__(self, backbone: Backbone, settings: LayUPSettings):
        self.layers = min(settings.layers, backbone.depth)
        super().__init__(backbone, settings, self.layers * backbone.dim)

    @property
    def features(self) -> Prompt:
        """Read the tokens of the last layers under the first session's prompt, if there is one."""
        return LayerTokens(self.layers, self.adaptation.get("prompt"))

    def map_features(self, embeddings: Tensor) -> Tensor:
        """Return class tokens [n, k * D], each with its norm if the settings say so."""
        if not self.settings.layer_norm:
            return embeddings
        return F.layer_norm(embeddings.unflatten(1, (self.layers, -1)), (self.backbone.dim,)).flatten(1)

    def choose_strength(self, hidden: Tensor, targets: Tensor, spectrum: Spectrum) -> float:
        """Choose the lambda of the best accuracy over the folds."""
        earlier_sums = self.sums - hidden.T @ targets
        folds = stratified_folds(targets.argmax(dim=1))
        if len(folds.unique()) == 1:  # one image of each class: nothing can be held out
            return LAMBDAS[0]
        return LAMBDAS[int(fold_accuracy(hidden, targets, self.factor, earlier_sums, folds, LAMBDAS).argmax())]


def stratified_folds(labels: Tensor) -> Tensor:
    """Assign each image to a fold, [n]: of every class, the first quarter to fold 0, the next to fold 1, and so on."""
    folds = torch.empty_like(labels)
    for label in labels.unique():
        class_rows = (labels == label).nonzero()[:, 0]
        folds[class_rows] = torch.arange(len(class_rows)) * FOLDS // len(class_rows)
    return folds
