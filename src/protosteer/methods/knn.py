"""Weighted nearest neighbours among all embeddings: what is done where every embedding may be kept.

The k kept embeddings x_i most similar to an image's embedding q vote for their classes with the weight
exp(cos(q, x_i) / T), and the class with the largest sum wins. Wu et al. (CVPR 2018) introduced this vote, and
Caron et al. (DINO, ICCV 2021) made it the usual evaluation of frozen features. As probability of a class we
give its share of the votes. Embeddings are kept in float32, so the state grows with every image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.methods.base import Answer, Images, Source
from protosteer.methods.feature_bank import KeepsEmbeddings
from protosteer.settings import Values, setting


@dataclass(frozen=True)
class KNNSettings(Values):
    # K: DINO's eval_knn.py tries 10, 20, 100 and 200 and calls 20 usually the best.
    neighbours: int = setting(20, at_least=1, at_most=10_000)
    temperature: float = setting(0.07, above=0)  # T: the default there
    embed_batch_size: int = setting(64, at_least=1, at_most=2**16)
    seed: int = setting(0, at_least=0)


class KNN(KeepsEmbeddings):
    name = "knn"
    source = Source(
        "Wu et al.", "Unsupervised feature learning via non-parametric instance discrimination", "CVPR", 2018
    )
    settings_class = KNNSettings

    def answer(self, images: Images) -> Answer:
        self.require_knowledge()
        queries = F.normalize(images.embed(torch.arange(len(images))), dim=1)
        known = F.normalize(self.embeddings, dim=1)
        # In parts: similarities of all images to all that is kept could take gigabytes.
        shares = torch.cat([self._shares(some, known) for some in queries.split(self.embed_batch_size)])
        confidence, classes = shares.max(dim=1)
        return Answer(classes, confidence=confidence)

    def _shares(self, queries: Tensor, known: Tensor) -> Tensor:
        """[B, K]: each class's share of the votes."""
        nearest = (queries @ known.T).topk(min(self.settings.neighbours, len(known)), dim=1)
        votes = (nearest.values / self.settings.temperature).softmax(dim=1)  # shares are all that matters
        none = torch.zeros(len(queries), len(self.classes))
        return none.scatter_add(1, self.labels[nearest.indices], votes)
