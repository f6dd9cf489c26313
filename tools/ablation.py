"""What each piece of prediction by evidence is worth: one learned model, read again and again with a piece
taken out.

    python tools/ablation.py experiments/beyond/best.toml runs/q10/seed-0/task-10.protosteer \
        --weights weights/deit_tiny_patch16_224.safetensors --data-dir data

Images are the stream's test images, or with --validation N the next N training images of each class after
those that were learned: what numbers are chosen by. Every image is embedded once in every space; all readings
share that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer import rules
from protosteer.backbones import Backbone
from protosteer.data.images import Chosen, ImageSet
from protosteer.evaluation.experiment import Experiment
from protosteer.evaluation.metrics import calibration_error, reliability
from protosteer.evidence import classifier, kernel_ridge, scorer
from protosteer.evidence.class_statistics import ClassStatistics
from protosteer.evidence.classifier import EvidenceClassifier
from protosteer.evidence.scorer import CoarseScorer
from protosteer.evidence.whitened import WhitenedCosine
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model.memory import Memory
from protosteer.rules import Reader
from protosteer.settings import read_toml
from protosteer.streams import open_stream


class Pictures:
    """Images and their labels, embedded under any prompt at most once."""

    def __init__(self, backbone: Backbone, parts: list[tuple[ImageSet, list[str]]]):
        self.backbone = backbone
        self.parts = parts
        self.labels = [label for _, labels in parts for label in labels]
        self.known: dict[bytes, Tensor] = {}

    def under(self, prompt: Tensor | None) -> Tensor:
        key = b"" if prompt is None else prompt.numpy().tobytes()
        if key not in self.known:
            self.known[key] = torch.cat([self.backbone.embed_set(images, prompt) for images, _ in self.parts])
        return self.known[key]

    def embed(self, reader: Reader) -> Any:
        prompts = reader.index.prompts

        def embed(rows: Tensor, numbers: Tensor | None) -> Tensor:
            if numbers is None or not len(rows):
                return self.under(None)[rows]
            return torch.stack([self.under(prompts[t])[row] for row, t in zip(rows, numbers.tolist(), strict=True)])

        return embed


def pictures(experiment: Experiment, backbone: Backbone, validation: int) -> Pictures:
    options = experiment.options
    learned = options.train_per_class
    if not validation:
        stream = open_stream(experiment.stream, options, backbone.preprocessing, experiment.data_dir)
        return Pictures(backbone, [(task.test, task.test_labels) for task in stream])
    if learned is None:
        raise SystemExit("--validation needs train_per_class in the configuration: what was not learned")
    options = dataclasses.replace(options, train_per_class=learned + validation)
    stream = open_stream(experiment.stream, options, backbone.preprocessing, experiment.data_dir)
    parts: list[tuple[ImageSet, list[str]]] = []
    for task in stream:
        seen: dict[str, int] = {}
        rows = []
        for row, label in enumerate(task.train_labels):
            seen[label] = seen.get(label, 0) + 1
            if seen[label] > learned:
                rows.append(row)
        parts.append((Chosen(task.train, rows), [task.train_labels[row] for row in rows]))
    return Pictures(backbone, parts)


@contextmanager
def changed(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class NotWhitened(WhitenedCosine):
    """The cosine about the mean of the class means, not whitened."""

    def __init__(self, statistics: ClassStatistics):
        super().__init__(statistics)
        self.precision = torch.eye(len(self.precision), dtype=torch.double)
        self.share = 0.0
        self.squared_lengths = self._squared_lengths()


class RidgeAlone(CoarseScorer):
    def scores(self, embeddings: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert self.ridge and classes is None
        unit = F.normalize(embeddings.double(), dim=1)
        return self.ridge.scores(unit).clamp(min=scorer.RIDGE_FLOOR).log(), super().scores(embeddings)[1]

    def loo_scores(self, classes: slice | None = None) -> tuple[Tensor, Tensor]:
        assert self.ridge
        columns = self.ridge.loo_scores[:, classes or self.statistics.all_classes]
        return columns.clamp(min=scorer.RIDGE_FLOOR).log(), super().loo_scores(classes)[1]


def readings(learner: Learner) -> Iterator[tuple[str, Learner, Any, dict[str, Any]]]:
    """Name, the model to read, and what to change meanwhile."""

    def reduced(**changes: Any) -> Learner:
        other = learner.copy()
        other.memory = Memory(dataclasses.replace(task, **changes) for task in learner.memory.tasks)
        return other

    bare = reduced(prompt=None)
    yield "everything", learner, classifier, {}
    yield "no own prompts", bare, classifier, {}
    yield "no prompt for all classes", reduced(shared_prompt=None), classifier, {}
    yield "no prompts at all", reduced(prompt=None, shared_prompt=None), classifier, {}
    one_space = {"EvidenceClassifier": partial(EvidenceClassifier, min_pass_weight=0.49)}
    yield "prompt for all classes alone, one pass", bare, rules.evidence, one_space
    yield "no ridge", learner, kernel_ridge, {"MAX_PROTOTYPES": 0, "LANDMARKS": 0}
    ten = {"MAX_PROTOTYPES": 0, "LANDMARKS": 1000}
    yield "ridge with ten landmarks per class", learner, kernel_ridge, ten
    yield "ridge alone", learner, classifier, {"CoarseScorer": RidgeAlone}
    yield "not whitened", learner, scorer, {"WhitenedCosine": NotWhitened}
    no_gate = {"CONFIDENT": 1.1, "MIN_TASK_PROB": 0.0}
    yield "no gate: every prompt for every image", learner, classifier, no_gate
    yield "at most one own prompt", learner, classifier, {"MAX_EXTRA_PASSES": 1}
    yield "second view never worth a pass", learner, rules.evidence, one_space
    yield "sure from 0.9", learner, classifier, {"CONFIDENT": 0.9}
    yield "open from 0.05", learner, classifier, {"MIN_TASK_PROB": 0.05}
    yield "fine evidence, half as much", learner, classifier, {"TASK_PROMPT_WEIGHT": 0.25}
    yield "fine evidence, twice as much", learner, classifier, {"TASK_PROMPT_WEIGHT": 1.0}
    yield "half the ridge", learner, scorer, {"RIDGE_SHARE": 0.15}
    yield "twice the ridge", learner, scorer, {"RIDGE_SHARE": 0.6}
    yield "lambda 0.01", learner, kernel_ridge, {"RIDGE": 0.01}
    yield "lambda 0.1", learner, kernel_ridge, {"RIDGE": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="TOML file that the run was started with")
    parser.add_argument("model", type=Path, help="a task's state in the run folder")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--validation", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    places = {"weights": given.weights, "data_dir": given.data_dir}
    experiment = Experiment.from_values({**read_toml(given.config), **places})
    backbone = experiment.load_backbone()
    learner = Learner.of_model(model_file.read(given.model), backbone)
    shown = pictures(experiment, backbone, given.validation)
    number = {name: i for i, name in enumerate(learner.classes)}
    truth = torch.tensor([number[label] for label in shown.labels])
    figures = {}
    for name, model, module, values in readings(learner):
        with changed(module, **values):
            reader = rules.reader_of(model.memory, model.settings)
            matches = reader.match(shown.embed(reader), len(truth))
        confidence, label = matches.scores.softmax(dim=1).max(dim=1)
        right = label == truth
        figures[name] = {
            "accuracy": 100 * float(right.double().mean()),
            "passes_per_image": float(matches.passes.double().mean()),
            "calibration_error": calibration_error(reliability(confidence, right)),
        }
        print(
            "{accuracy:6.2f} %  {passes_per_image:5.2f} passes  ece {calibration_error:4.1f}".format(**figures[name]),
            f" {name}",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps({"images": len(truth), "readings": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
