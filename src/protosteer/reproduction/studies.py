"""Experiments whose numbers are not metrics of runs; a definition names one as `study`.

A study is a function of an experiment's cells and the `Place` of its runs. It returns the numbers of each row, column
and metric, and further pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from protosteer.evaluation.run_folder import read_run
from protosteer.evaluation.stored_runs import load_learner, open_run_stream
from protosteer.learner import Learner
from protosteer.paper.inference import class_scores
from protosteer.paper.losses import contrastive
from protosteer.report.plots import DPI, Floats, draw_points, png, tsne_before_after
from protosteer.reproduction.definition import Definition, Scale
from protosteer.reproduction.grid import Cell, Place, is_finished
from protosteer.reproduction.results import Number, Result, mean_and_std
from protosteer.streams import Stream

MAX_IMAGES = 600  # of a split, in maps and measurements; more are chosen evenly

# Values of each seed by row, column and metric; and pictures by file name.
StudyValues = tuple[Mapping[tuple[str, str, str], Sequence[float]], Mapping[str, bytes]]


def run_study(
    definition: Definition, scale: Scale, cells: Sequence[Cell], failures: Mapping[Path, str], place: Place
) -> Result:
    """Fill an experiment's cells by its study; runs that it needs and that are not finished are reported."""
    runs = {cell.run.folder: cell.run for cell in cells if cell.run}
    folders = [folder for folder, run in runs.items() if not is_finished(run)]
    reasons = {folder.name: failures.get(folder, "not finished") for folder in folders}
    if reasons:
        return Result(definition, scale, {}, reasons)
    values, pictures = STUDIES[definition.study](cells, place)
    numbers = {}
    for (row, column, metric), seeds in values.items():
        mean, std = mean_and_std(seeds)
        paper = definition.paper_value(row, column, metric)
        numbers[row, column, metric] = Number(row, column, metric, mean, std, len(seeds), *paper)
    return Result(definition, scale, numbers, pictures=pictures)


def compare_gradients(cells: Sequence[Cell], place: Place) -> StudyValues:
    """Compare Appendix A's closed form of the loss's gradient by each similarity with autograd's, for random batches."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 4, (32,), generator=draw)
        similarity = (2 * torch.rand(32, 48, generator=draw, dtype=torch.float64) - 1).requires_grad_()
        same_class = torch.zeros(32, 48, dtype=torch.bool)
        same_class[:, :32] = labels[:, None] == labels
        positives = same_class & ~torch.eye(32, 48, dtype=torch.bool)
        contrastive(similarity, positives, ~same_class, 0.6).backward()
        assert similarity.grad is not None
        rows = int((positives.sum(dim=1) > 0).sum())
        closed_gradient = closed_form(similarity.detach(), positives, ~same_class, 0.6) / rows
        errors = (similarity.grad - closed_gradient).abs()
        for row, mask in (("positive", positives), ("negative", ~same_class)):
            values.setdefault((row, "value", "error_gradient"), []).append(float(errors[mask].max()))
    return values, {}


def closed_form(similarity: Tensor, positives: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """Compute the gradient of L_i by s_ij [R, M]: -1 / (tau |P(i)|) for positives, softmax / tau for negatives."""
    count = positives.sum(dim=1, keepdim=True)
    weights = (similarity / temperature).masked_fill(~negatives, -torch.inf).softmax(dim=1)
    return (weights * (count > 0) - positives.to(similarity) / count.clamp(min=1)) / temperature


@dataclass(frozen=True)
class LearnedRun:
    """A finished run's model and stream."""

    learner: Learner
    stream: Stream

    def embed(self, task: int, split: str, prompt: int | None) -> tuple[Tensor, list[str]]:
        """Embed a task's images of a split under a task's prompt, or without one; returns [N, D] and labels."""
        data = self.stream[task]
        images, labels = (data.train, data.train_labels) if split == "train" else (data.test, data.test_labels)
        limit = max(1, MAX_IMAGES // len(self.stream))
        rows = np.linspace(0, len(images) - 1, min(len(images), limit)).round().astype(int).tolist()
        tensor = None if prompt is None else self.learner.memory.tasks[prompt].prompt
        size = self.learner.settings.embed_batch_size
        return self.learner.backbone.embed_set(images, tensor, size, rows=rows), [labels[row] for row in rows]


def _load_runs(cells: Sequence[Cell], place: Place) -> list[LearnedRun]:
    """Load the models of all seeds of the one run that a study needs."""
    run = next(cell.run for cell in cells if cell.run)
    configuration, _ = read_run(run.folder)
    stream = open_run_stream(run.folder, configuration, place.data_dir)
    learners = [load_learner(run, seed) for seed in run.seeds or ()]
    assert stream is not None and all(learner is not None for learner in learners)  # they have just been run
    return [LearnedRun(learner, stream) for learner in learners if learner]


def measure_energy(cells: Sequence[Cell], place: Place) -> StudyValues:
    """Measure the free energy of Appendix B for test images, under the prompt of their task and under the others."""
    models = _load_runs(cells, place)
    values: dict[tuple[str, str, str], list[float]] = {}
    for model in models:
        temperature, index = model.learner.settings.temperature, model.learner.reader.index.prototypes
        right_energies, wrong_energies, lowest_flags = [], [], []
        for task in range(len(model.stream)):
            energies = torch.stack([
                -temperature * (class_scores(index, model.embed(task, "test", prompt)[0]) / temperature).logsumexp(dim=1)
                for prompt in range(len(model.stream))
            ])  # fmt: skip
            other_energies = torch.cat([energies[:task], energies[task + 1 :]])
            right_energies.append(energies[task])
            wrong_energies.append(other_energies.mean(dim=0))
            lowest_flags.append((energies[task] <= other_energies.min(dim=0).values).float())
        for row, parts in (("right", right_energies), ("wrong", wrong_energies)):
            values.setdefault((row, "value", "free_energy"), []).append(float(torch.cat(parts).mean()))
        values.setdefault(("right", "value", "lowest_share"), []).append(100.0 * float(torch.cat(lowest_flags).mean()))
    return values, {}


def draw_maps(cells: Sequence[Cell], place: Place) -> StudyValues:
    """Draw the paper's maps, and measure in each how many images are nearest to a prototype of their class."""
    models = _load_runs(cells, place)
    values: dict[tuple[str, str, str], list[float]] = {}
    pictures: dict[str, bytes] = {}
    for model in models:
        panels = {split: _compute_panels(model, split) for split in ("train", "test")}
        for split, split_panels in panels.items():
            for row, (points, labels, prototypes) in split_panels.items():
                values.setdefault((row, split, "nearest_right"), []).append(_share_of_hits(points, labels, prototypes))
            pictures.setdefault(f"tsne-{split}.png", _draw_panels(split_panels, split))
        key_panel, value_panel = (panels["test"][row] for row in ("original-key-multi", "prompted-value-multi"))
        picture = tsne_before_after(key_panel[0], value_panel[0], key_panel[1], key_panel[2], value_panel[2])
        pictures.setdefault("tsne.png", picture)
    return values, pictures


Panel = tuple[Floats, list[str], dict[str, Floats]]
PANELS = {
    "original-key-mean": "original images, key class means",
    "original-key-multi": "original images, key centroids",
    "original-value-mean": "original images, value class means",
    "original-value-multi": "original images, value centroids",
    "prompted-value-mean": "prompted images, value class means",
    "prompted-value-multi": "prompted images, value centroids",
}


def _compute_panels(model: LearnedRun, split: str) -> dict[str, Panel]:
    """Return points, labels and prototypes of the six panels of a split."""
    tasks = range(len(model.stream))
    embeddings = {
        "original": [model.embed(t, split, None) for t in tasks],
        "prompted": [model.embed(t, split, t) for t in tasks],
    }
    records = [record for task in model.learner.memory.tasks for record in task.classes]
    prototypes = {
        "key-multi": {record.name: record.keys.numpy() for record in records},
        "value-multi": {record.name: record.values.means.numpy() for record in records},
        "key-mean": _class_means([model.embed(t, "train", None) for t in tasks]),
        "value-mean": _class_means([model.embed(t, "train", t) for t in tasks]),
    }
    panels = {}
    for name in PANELS:
        images, _, kind = name.partition("-")
        points = torch.cat([part for part, _ in embeddings[images]]).numpy()
        panels[name] = (points, [label for _, labels in embeddings[images] for label in labels], prototypes[kind])
    return panels


def _class_means(parts: Sequence[tuple[Tensor, list[str]]]) -> dict[str, Floats]:
    """Return the mean embedding [1, D] of each class."""
    means = {}
    for embeddings, labels in parts:
        for name in dict.fromkeys(labels):
            mask = torch.tensor([label == name for label in labels])
            means[name] = embeddings[mask].mean(dim=0, keepdim=True).numpy()
    return means


def _share_of_hits(points: Floats, labels: Sequence[str], prototypes: Mapping[str, Floats]) -> float:
    """Return the percentage of images whose most similar prototype, by cosine, is of their class."""
    owners = [name for name, group in prototypes.items() for _ in range(len(group))]
    rows = F.normalize(torch.from_numpy(np.concatenate(list(prototypes.values()))), dim=1)
    nearest = (F.normalize(torch.from_numpy(points), dim=1) @ rows.T).argmax(dim=1).tolist()
    return 100.0 * sum(owners[k] == label for k, label in zip(nearest, labels, strict=True)) / len(labels)


def _draw_panels(panels: Mapping[str, Panel], split: str) -> bytes:
    """Draw the six panels of a split in the paper's layout: three rows of two."""
    figure = Figure(figsize=(9.6, 13.2), dpi=DPI, layout="constrained")
    for axes, (name, (points, labels, prototypes)) in zip(figure.subplots(3, 2).flat, panels.items(), strict=True):
        draw_points(axes, points, labels, prototypes, list(prototypes))
        axes.set_title(PANELS[name], fontsize=10)
    figure.suptitle(f"t-SNE of {split} images; stars are prototypes", fontsize=12)
    return png(figure)


STUDIES: Mapping[str, Callable[[Sequence[Cell], Place], StudyValues]] = {
    "gradients": compare_gradients,
    "energy": measure_energy,
    "tsne": draw_maps,
}
