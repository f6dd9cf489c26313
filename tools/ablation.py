"""Measure what each piece of the default classifier is worth: one learned model, read with a piece removed or changed.

    python tools/ablation.py experiments/beyond/fast.toml runs/q10-fast/seed-0/task-10.protosteer \
        --weights weights/deit_tiny_patch16_224.safetensors --data-dir data

Images are the stream's test images, or with --validation N the next N training images of each class after those that
were learned. Every image is embedded once under each prompt; all readings share that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protosteer import rules
from protosteer.backbones import Backbone
from protosteer.data.images import Chosen, ImageSet
from protosteer.evaluation.experiment import Experiment
from protosteer.evidence import calibration, classifier, kernel_ridge, scorer
from protosteer.evidence.calibration import ImageWeights, LooScores
from protosteer.evidence.class_statistics import ClassStatistics
from protosteer.evidence.whitened import WhitenedCosine
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model.class_table import LAYERS, ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.rules import Reader
from protosteer.settings import read_toml
from protosteer.streams import open_stream
from protosteer.util.statistics import calibration_error, reliability


class Pictures:
    """Images and their labels, embedded under any prompt at most once."""

    def __init__(self, backbone: Backbone, parts: list[tuple[ImageSet, list[str]]]):
        self.backbone = backbone
        self.parts = parts
        self.labels = [label for _, labels in parts for label in labels]
        self.embeddings: dict[bytes, Tensor] = {}

    def under(self, prompt: Tensor | None) -> Tensor:
        key = b"" if prompt is None else prompt.numpy().tobytes()
        if key not in self.embeddings:
            backbone = self.backbone.reading("several")
            self.embeddings[key] = torch.cat([backbone.embed_set(images, prompt) for images, _ in self.parts])
        return self.embeddings[key]

    def embed(self, reader: Reader) -> Any:
        prompts, width = reader.index.prompts, self.backbone.reading(reader.layers).width

        def embed(rows: Tensor, numbers: Tensor | None) -> Tensor:
            if numbers is None or not len(rows):
                return self.under(None)[rows, :width]
            pairs = zip(rows, numbers.tolist(), strict=True)
            return torch.stack([self.under(prompts[t])[row, :width] for row, t in pairs])

        return embed


def load_pictures(experiment: Experiment, backbone: Backbone, validation: int) -> Pictures:
    options = experiment.options
    num_learned = options.train_per_class
    if not validation:
        stream = open_stream(experiment.stream, options, backbone.preprocessing, experiment.data_dir)
        return Pictures(backbone, [(task.test, task.test_labels) for task in stream])
    if num_learned is None:
        raise SystemExit("--validation needs train_per_class in the configuration: what was not learned")
    options = dataclasses.replace(options, train_per_class=num_learned + validation)
    stream = open_stream(experiment.stream, options, backbone.preprocessing, experiment.data_dir)
    parts: list[tuple[ImageSet, list[str]]] = []
    for task in stream:
        counts: dict[str, int] = {}
        rows = []
        for row, label in enumerate(task.train_labels):
            counts[label] = counts.get(label, 0) + 1
            if counts[label] > num_learned:
                rows.append(row)
        parts.append((Chosen(task.train, rows), [task.train_labels[row] for row in rows]))
    return Pictures(backbone, parts)


@contextmanager
def patched(module: Any, **values: Any) -> Iterator[None]:
    originals = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)


class NotWhitened(WhitenedCosine):
    """The cosine about the mean of the class means, not whitened."""

    def __init__(self, statistics: ClassStatistics):
        super().__init__(statistics)
        self.precision = torch.eye(len(self.precision), dtype=torch.double)
        self.share = 0.0
        self.squared_lengths = self._squared_lengths()


class PriorShares(LooScores):
    def shares(self, prior: Tensor, images: ImageWeights) -> Tensor:
        return prior


class RidgeOnly(LooScores):
    def shares(self, prior: Tensor, images: ImageWeights) -> Tensor:
        return (torch.arange(len(prior)) == len(prior) - 1).double()


def readings(learner: Learner) -> Iterator[tuple[str, Learner, Any, dict[str, Any]]]:
    """Yield a name, the model to read, and what to change meanwhile."""

    def changed_tasks(change: Callable[[TaskRecord], TaskRecord]) -> Learner:
        twin = learner.copy()
        twin.memory = Memory(change(task) for task in learner.memory.tasks)
        return twin

    def last_layer(task: TaskRecord) -> TaskRecord:
        table = task.classes
        starts = {group: rows for group, rows in table.starts.items() if group not in LAYERS.values()}
        return dataclasses.replace(task, classes=ClassTable.of_columns(table.names, table.columns, starts))

    yield "everything", learner, classifier, {}
    yield "last layer alone", changed_tasks(last_layer), classifier, {}
    if learner.memory.shared_prompt is not None:
        promptless = changed_tasks(lambda task: dataclasses.replace(task, shared_prompt=None))
        yield "last layer alone, without the shared prompt", promptless, classifier, {}
    if sum(task.prompt is not None for task in learner.memory.tasks) > 1:
        yield "no task-specific prompts", changed_tasks(lambda t: dataclasses.replace(t, prompt=None)), classifier, {}
        no_gate = {"CONFIDENT": 1.1, "MIN_TASK_PROB": 0.0}
        yield "task-specific prompts for every image", learner, classifier, no_gate
    yield "no ridge", learner, kernel_ridge, {"MAX_PROTOTYPES": 0, "LANDMARKS": 0}
    yield "ridge alone", learner, classifier, {"LooScores": RidgeOnly}
    yield "cosines not whitened", learner, scorer, {"WhitenedCosine": NotWhitened}
    yield "shares fixed at the prior", learner, classifier, {"LooScores": PriorShares}
    yield "prior worth 5 images", learner, calibration, {"PRIOR_IMAGES": 5.0}
    yield "prior worth 100 images", learner, calibration, {"PRIOR_IMAGES": 100.0}
    yield "lambda 0.02", learner, kernel_ridge, {"RIDGE_SEVERAL": 0.02}
    yield "lambda 0.1", learner, kernel_ridge, {"RIDGE_SEVERAL": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="TOML file that the run was started with")
    parser.add_argument("model", type=Path, help="a task's state in the run folder")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--validation", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    places = {"weights": options.weights, "data_dir": options.data_dir}
    experiment = Experiment.from_values({**read_toml(options.config), **places})
    backbone = experiment.load_backbone()
    learner = Learner.of_model(model_file.read(options.model), backbone)
    images = load_pictures(experiment, backbone, options.validation)
    number = {name: i for i, name in enumerate(learner.classes)}
    truth = torch.tensor([number[label] for label in images.labels])
    figures = {}
    for name, model, module, values in readings(learner):
        with patched(module, **values):
            reader = rules.reader_of(model.memory, model.settings)
            matches = reader.match(images.embed(reader), len(truth))
        confidence, label = matches.scores.softmax(dim=1).max(dim=1)
        correct = label == truth
        figures[name] = {
            "accuracy": 100 * float(correct.double().mean()),
            "passes_per_image": float(matches.passes.double().mean()),
            "calibration_error": calibration_error(reliability(confidence, correct)),
        }
        print(
            "{accuracy:6.2f} %  {passes_per_image:5.2f} passes  ece {calibration_error:4.1f}".format(**figures[name]),
            f" {name}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"images": len(truth), "readings": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
