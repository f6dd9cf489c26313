"""Weighted nearest neighbours among the embeddings of all training images.

The k stored embeddings x_i most similar to an image's embedding q vote for their classes with weight
exp(cos(q, x_i) / T). The prediction is the class with the largest sum. Wu et al. (CVPR 2018) introduced this vote, and
Caron et al. (DINO, ICCV 2021) made it the usual evaluation of frozen features. The confidence of a class is its share
of the votes. Embeddings are stored in float32, so the state grows with every image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.methods.base import Answer, Images, MethodSettings, Source, register_method
from protosteer.methods.feature_bank import FeatureBank
from protosteer.settings import setting


@dataclass(frozen=True)
class KNNSettings(MethodSettings):
    """Settings of KNN."""

    # k: DINO's eval_knn.py tries 10, 20, 100 and 200 and calls 20 usually the best.
    neighbours: int = setting(20, at_least=1, at_most=10_000)
    temperature: float = setting(0.07, above=0)  # T: the default there


@register_method("knn")
class KNN(FeatureBank):
    """Weighted k nearest neighbours."""

    source = Source(
        "Wu et al.", "Unsupervised feature learning via non-parametric instance discrimination", "CVPR", 2018
    )
    settings_class = KNNSettings
    grid = {"neighbours": (20, 5, 50)}

    def answer(self, images: Images) -> Answer:
        """Predict the class with most of the votes."""
        queries = F.normalize(images.embed(torch.arange(len(images))), dim=1)
        bank = F.normalize(self.embeddings, dim=1)
        # In batches: the similarities of all images to all embeddings could take gigabytes.
        shares = torch.cat([self._shares(batch, bank) for batch in queries.split(self.embed_batch_size)])
        confidence, classes = shares.max(dim=1)
        return Answer(classes, confidence=confidence, scores=shares)

    def _shares(self, queries: Tensor, bank: Tensor) -> Tensor:
        """Compute each class's share of the votes, [B, K]."""
        matches = (queries @ bank.T).topk(min(self.settings.neighbours, len(bank)), dim=1)
        votes = (matches.values / self.settings.temperature).softmax(dim=1)  # shares are all that matters
        shares = torch.zeros(len(queries), len(self.classes))
        return shares.scatter_add(1, self.labels[matches.indices], votes)
