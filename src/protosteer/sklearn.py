"""A scikit-learn classifier, for pipelines, cross-validation and searches, of images or of feature vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.errors import DataError, SettingsError
from protosteer.evidence.matches import ClassifierMatches
from protosteer.learner import Learner
from protosteer.model.memory import Memory
from protosteer.prediction import Prediction
from protosteer.rules import Reader, reader_of
from protosteer.settings import Settings
from protosteer.tasks import learn_class

_CHUNK = 1024  # vectors that are compared with all classes at once


class ProtosteerClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier whose `partial_fit` adds new classes and keeps the earlier ones.

    Args:
        backbone: A `Backbone` or its name: X are images, as an array [n, H, W, 3] or as paths. None: X are feature
            vectors [n, d], such as embeddings, compared by their directions.
        preset: "instant" trains nothing; vectors allow no other. Images also allow "fast", "best" and "paper".
        random_state: Seed of everything random.

    Attributes:
        classes_: The labels, in sorted order.
        learner_: The learner; for images a `Learner`, which can be saved.
    """

    def __init__(self, backbone: str | Backbone | None = None, preset: str = "instant", random_state: int = 0):
        self.backbone = backbone
        self.preset = preset
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> ProtosteerClassifier:
        """Learn the classes `y` [n] of images or vectors `X`; earlier classes are dropped."""
        X, y = self._examples(X, y, is_first=True)
        learner = self._new_learner()
        learner.learn((X, _names(y)))
        self.learner_, self.classes_ = learner, np.unique(y)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> ProtosteerClassifier:
        """Learn new classes, or more images of known ones.

        Args:
            X: Images or vectors. Each call stores up to 40 feature vectors per class, so pass images in batches, not
                one by one.
            y: Their labels [n].
            classes: Labels of later calls, optional; their probability is 0 until they are learned.

        Returns:
            The classifier itself.
        """
        is_first = not hasattr(self, "learner_")
        X, y = self._examples(X, y, is_first)
        learner = self._new_learner() if is_first else self.learner_
        learner.learn((X, _names(y)))
        labels = [*([] if is_first else [self.classes_]), *([] if classes is None else [classes]), y]
        self.learner_, self.classes_ = learner, np.unique(np.concatenate([np.asarray(part) for part in labels]))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Predict calibrated probabilities of `classes_` for n images or vectors: [n, C]."""
        check_is_fitted(self, "learner_")
        X = validate_data(self, X, reset=False) if self.backbone is None else _images(X)
        prediction = self.learner_.predict(X)
        places = {name: place for place, name in enumerate(_names(self.classes_))}
        columns = torch.tensor([places[name] for name in prediction.classes])[prediction.class_ids]
        probabilities = torch.zeros(len(prediction), len(places), dtype=torch.double)
        probabilities.scatter_(1, columns, prediction.probabilities.double())
        return (probabilities / probabilities.sum(dim=1, keepdim=True)).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Predict the class of each image or vector: [n]."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(axis=1)]

    def _new_learner(self) -> Learner | VectorLearner:
        settings = Settings.preset(self.preset, seed=self.random_state)
        if isinstance(self.backbone, str):
            return Learner(Backbone.load(self.backbone), settings)
        if self.backbone is not None:
            return Learner(self.backbone, settings)
        if settings.prompts:
            message = (
                f"preset={self.preset!r}: feature vectors have no prompts; use preset='instant', or give a backbone"
            )
            raise SettingsError(message, code="preset-needs-backbone", preset=self.preset)
        return VectorLearner(settings)

    def _examples(self, X: Any, y: Any, is_first: bool) -> tuple[Any, np.ndarray]:
        if self.backbone is None:
            X, y = validate_data(self, X, y, reset=is_first)
        else:
            X, y = _images(X), column_or_1d(y, warn=True)
        check_classification_targets(y)
        return X, y

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = self.backbone is None
        tags.input_tags.string = self.backbone is not None
        return tags


class VectorLearner:
    """A `Learner` of feature vectors instead of images; it trains nothing."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.memory = Memory()
        self.reader: Reader | None = None

    def learn(self, data: tuple[np.ndarray, Sequence[str]]) -> None:
        """Learn vectors [n, d] with the names [n] of their classes: all of them or, if an error is raised, none."""
        vectors, names = _units(data[0]), np.asarray(data[1])
        memory = Memory(self.memory.tasks)
        for name in map(str, np.unique(names)):
            memory.add(learn_class(name, _Embedded(vectors[names == name]), memory, self.settings))
        self.memory, self.reader = memory, reader_of(memory, self.settings)

    def predict(self, data: np.ndarray) -> Prediction:
        """Predict vectors [n, d]."""
        reader = self.reader
        assert reader is not None
        parts = [_match(reader, chunk) for chunk in _units(data).split(_CHUNK)]
        return Prediction.build(reader.index, ClassifierMatches.join(parts), reader.temperature)


def _match(reader: Reader, vectors: Tensor) -> ClassifierMatches:
    return reader.match(lambda rows, prompts: vectors[rows], len(vectors))


class _Embedded:
    """The `LayerEmbedder` of given embeddings [n, D]."""

    def __init__(self, embeddings: Tensor):
        self.embeddings = embeddings

    def embed(self, prompt: Tensor | None) -> Tensor:
        return self.embeddings

    def features(self, prompt: Tensor | None) -> Tensor:
        return self.embeddings[:, None]


def _units(vectors: np.ndarray) -> Tensor:
    """Normalise vectors [n, d] to length 1, in float32: only directions count, and float16 may not hold other lengths."""
    return F.normalize(torch.from_numpy(np.array(vectors, dtype=np.float64)), dim=1).float()


def _names(labels: np.ndarray) -> list[str]:
    return [str(label) for label in labels]


def _images(X: Any) -> Any:
    """Convert an array of paths to a list; check that any other array holds images."""
    if isinstance(X, (list, tuple)) or not hasattr(X, "__array__"):
        return X
    array = np.asarray(X)
    if array.dtype.kind in "UO" and array.ndim == 1:
        return array.tolist()
    if array.ndim < 3:
        raise DataError(
            f"X has shape {list(array.shape)}; with a backbone give images [n, H, W, 3] or paths, without one "
            "feature vectors [n, d]",
            code="not-images",
        )
    return array
