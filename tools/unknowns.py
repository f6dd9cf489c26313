"""How well images of known classes are told from images of classes never taught, and whether `--reject` keeps
its word.

    python tools/unknowns.py measure cifar-100-python --tasks 3 --classes-per-task 10 --train 20 --known 10 --unseen 5 \
        --set epochs=15 --set batch_size=50 --out deit.json
    python tools/unknowns.py table experiments/unknown/*.json

The first classes of a data set are written as image files and taught as `protosteer learn` does it, task
after task, with a share held out for calibration. Test images of these classes are known; those of the set's
other classes, and of the sets that --unknown names, are not. Images are the first of each class in file
order, classes follow their numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.cli.options import parse_settings
from protosteer.data.class_folders import Files
from protosteer.data.datasets.cifar import cifar_files, read_cifar100
from protosteer.data.datasets.idx import idx_files, read_images
from protosteer.errors import DataError, SettingsError
from protosteer.evaluation.manifest import circumstances
from protosteer.learner import Learner
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.prediction import Prediction
from protosteer.settings import PRESETS, Settings
from protosteer.workflows.folder_scan import scan_folder
from protosteer.workflows.learn_folder import HOLDOUT, learn_folder
from protosteer.workflows.ood import threshold

TEMPERATURES = (1.0, 0.3, 0.1, 0.05, 0.02)
FRACTIONS = (0.01, 0.05, 0.1, 0.2)
OTHERS = "other classes"  # of the data set whose first classes are taught


@dataclass(frozen=True)
class Images:
    pixels: Tensor  # uint8 [N, 3, h, w]
    labels: list[str]
    classes: list[str]  # in the order of their numbers


def read(folder: Path, split: str) -> Images:
    """Read the training or test images of a folder with CIFAR-100, or with idx files as MNIST has them."""
    if cifar_files(folder, 100):
        pixels, numbers, names = read_cifar100(folder, split)
    else:
        files = idx_files(folder, ({"train": "train", "test": "t10k"}[split],))
        if files is None:
            problem = f"neither CIFAR-100 nor idx files of the {split} images"
            raise DataError(f"{folder} holds {problem}; unpack them there")
        pixels, numbers = read_images(*files)
        names = [str(number) for number in range(int(numbers.max()) + 1)]
    return Images(pixels, [names[number] for number in numbers.tolist()], names)


def write(images: Images, classes: Sequence[str], per_class: int, folder: Path) -> Files:
    """Write the first images of each of these classes as files in class folders."""
    files = Files([], [])
    for name in classes:
        rows = [row for row, label in enumerate(images.labels) if label == name][:per_class]
        if len(rows) < per_class:
            raise DataError(f"class '{name}' has {len(rows)} images, not {per_class}; ask for fewer")
        (folder / name).mkdir(parents=True)
        for row in rows:
            path = folder / name / f"{row:05d}.png"
            Image.fromarray(images.pixels[row].permute(1, 2, 0).numpy()).save(path)
            files.paths.append(path)
            files.labels.append(name)
    return files


def learn_all(learner: Learner, folders: Mapping[str, Path], holdout: float, model: Path | None) -> None:
    """Learn each folder as a task, by name; tasks that the learner has are skipped."""
    for name, folder in folders.items():
        if name not in learner.tasks:
            result = learn_folder(learner, scan_folder(folder, learner.memory), name, holdout)
            check = f", {result.check.accuracy.percent:.1f} % of the held-out images right" if result.check else ""
            print(f"{name}: {', '.join(result.record.class_names)}{check}", file=sys.stderr, flush=True)
            if model:
                learner.save(model)


def of_tasks(learner: Learner, tasks: Sequence[TaskRecord]) -> Learner:
    """Return the learner as it would be with these tasks only."""
    twin = learner.copy()
    twin.memory = Memory(tasks)
    return twin


def areas(known: Tensor, unknown: Tensor, temperature: float) -> dict[str, Any]:
    """Compute the AUROC of several scores of unknown images, from similarities to the classes, [n, C] and [m, C]."""
    truth = [0] * len(known) + [1] * len(unknown)

    def area(score: Callable[[Tensor], Tensor]) -> float:
        return round(float(roc_auc_score(truth, score(torch.cat([known, unknown]).double()))), 4)

    def energy(t: float) -> float:
        return area(lambda scores: -t * (scores / t).logsumexp(dim=1))

    return {
        "energy": {f"{t:g}": energy(t) for t in (temperature, *TEMPERATURES)},
        "similarity": area(lambda scores: -scores.amax(dim=1)),
        "probability": area(lambda scores: -(scores / temperature).softmax(dim=1).amax(dim=1)),
    }


def percent(flags: Tensor) -> float | None:
    """Return the percentage of true values; None if there are no values."""
    return round(100.0 * float(flags.double().mean()), 2) if len(flags) else None


def cell(share: float | None) -> str:
    return "–" if share is None else f"{share:.1f}"


def rejected(prediction: Prediction, limit: float) -> Tensor:
    return prediction.similarities.amax(dim=1) < limit


def growth(learner: Learner, known: Mapping[str, Files]) -> dict[str, Any]:
    """Return the percentage of each task's known images rejected, by a model of that task alone and after each task.

    Thresholds are those of each model.
    """

    def shares(tasks: Sequence[TaskRecord]) -> dict[str, dict[str, float | None]]:
        model = of_tasks(learner, tasks)
        predictions = {task.name: model.predict(known[task.name].paths) for task in tasks}
        limits = {f"{fraction:g}": threshold(model, fraction) for fraction in FRACTIONS}
        return {f: {t: percent(rejected(p, limit)) for t, p in predictions.items()} for f, limit in limits.items()}

    tasks = learner.memory.tasks
    by_task = [shares([task]) for task in tasks]
    alone = {f: {t: share for model in by_task for t, share in model[f].items()} for f in by_task[0]}
    return {"alone": alone, "after": [shares(tasks[: n + 1]) for n in range(len(tasks))]}


def report(learner: Learner, known: Mapping[str, Files], unknown: Mapping[str, Files]) -> dict[str, Any]:
    """Measure one model on files, `known` by task and `unknown` by data set."""
    known_predictions = {task: learner.predict(files.paths) for task, files in known.items()}
    unknown_predictions = {name: learner.predict(files.paths) for name, files in unknown.items()}
    similarities = torch.cat([prediction.similarities for prediction in known_predictions.values()])
    pairs = [pair for t, p in known_predictions.items() for pair in zip(p.labels, known[t].labels, strict=True)]
    correct = torch.tensor([label == truth for label, truth in pairs])
    retrieved = torch.tensor([t in candidates for t, p in known_predictions.items() for candidates in p.candidates])
    choices = []
    for fraction in FRACTIONS:
        limit = threshold(learner, fraction)
        is_rejected = similarities.amax(dim=1) < limit
        choices.append({
            "reject": fraction,
            "threshold": round(limit, 4),
            "known_rejected": percent(is_rejected),
            "known_rejected_task_retrieved": percent(is_rejected[retrieved]),
            "known_rejected_task_missed": percent(is_rejected[~retrieved]),
            "unknown_rejected": {name: percent(rejected(p, limit)) for name, p in unknown_predictions.items()},
            "accuracy_of_kept": percent(correct[~is_rejected]),
            "right_rejected": percent(is_rejected[correct]),
            "wrong_rejected": percent(is_rejected[~correct]),
        })  # fmt: skip
    temperature = learner.settings.temperature
    return {
        "accuracy": percent(correct),
        "retrieval_accuracy": percent(retrieved),
        "auroc": {name: areas(similarities, p.similarities, temperature) for name, p in unknown_predictions.items()},
        "rejection": choices,
        "rejected_by_task": growth(learner, known),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    backbone = Backbone.load(
        options.backbone, weights=options.weights, image_size=options.image_size, crop=options.crop
    )
    settings = Settings.preset(options.preset, **parse_settings(options.set) | {"seed": options.seed})
    train, test = read(options.data, "train"), read(options.data, "test")
    size = options.classes_per_task
    tasks = {f"task-{i + 1}": train.classes[i * size : (i + 1) * size] for i in range(options.tasks)}
    unlearned = train.classes[options.tasks * size :]
    learner = begin(options.model, backbone, settings, tasks)
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        for name, classes in tasks.items():
            write(train, classes, options.train, base / "learn" / name)
        known = {t: write(test, classes, options.known, base / "known" / t) for t, classes in tasks.items()}
        unknown = {OTHERS: write(test, unlearned, options.unseen, base / "unknown" / OTHERS)} if unlearned else {}
        for folder in options.unknown:
            images, place = read(folder, "test"), base / "unknown" / folder.name
            unknown[folder.name] = write(images, images.classes, options.unseen, place)
        learn_all(learner, {name: base / "learn" / name for name in tasks}, options.holdout, options.model)
        figures = report(learner, known, unknown)
    heldout = [c.heldout_similarities for c in learner.memory.records if c.heldout_similarities is not None]
    return figures | {
        "data": {
            "set": options.data.name,
            "tasks": tasks,
            "train_per_class": options.train,
            "holdout": options.holdout,
            "held_out_images": sum(len(similarities) for similarities in heldout),
            "known_images": sum(len(files) for files in known.values()),
            "unknown_images": {name: len(files) for name, files in unknown.items()},
            "unseen_per_class": options.unseen,
        },
        "settings": settings.to_dict(),
        "backbone": {key: value for key, value in backbone.describe().items() if key != "source"},
        **circumstances(backbone.device),
    }


def begin(model: Path | None, backbone: Backbone, settings: Settings, tasks: Mapping[str, Sequence[str]]) -> Learner:
    """Create a learner, or load the one in the model file if it has the same settings and tasks."""
    if model is None or not model.is_file():
        return Learner(backbone, settings)
    learner = Learner.load(model, backbone)
    is_other = any(sorted(tasks.get(t.name, [])) != sorted(t.class_names) for t in learner.memory.tasks)
    if learner.settings != settings or is_other:
        raise SettingsError(f"{model} was taught other tasks or with other settings; name another file")
    return learner


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: how well the measures tell unknown images, then what each choice of --reject does."""
    result_shape = next(iter(results.values()))
    temperatures = list(next(iter(result_shape["auroc"].values()))["energy"])
    energies = [f"energy, τ = {t}" for t in temperatures]
    areas = [["AUROC", "unknown", *energies, "greatest similarity", "greatest probability"]]
    shares = [
        [
            "percent",
            "`--reject`",
            "known rejected",
            "by task",
            "unknown rejected",
            "accuracy, all",
            "of those kept",
        ]
    ]
    for name, result in results.items():
        for unknown_set, area in result["auroc"].items():
            values = [*area["energy"].values(), area["similarity"], area["probability"]]
            areas.append([name, unknown_set, *(f"{value:.3f}" for value in values)])
        for choice in result["rejection"]:
            by_task = result["rejected_by_task"]["after"][-1][f"{choice['reject']:g}"].values()
            unknown_shares = (f"{cell(share)} ({set_name})" for set_name, share in choice["unknown_rejected"].items())
            cells = [cell(choice["known_rejected"]), ", ".join(map(cell, by_task)), ", ".join(unknown_shares)]
            cells += [cell(result["accuracy"]), cell(choice["accuracy_of_kept"])]
            shares.append([name, f"{choice['reject']:g}", *cells])
    return f"{_markdown(areas)}\n\n{_markdown(shares)}"


def _markdown(rows: list[list[str]]) -> str:
    heading, *lines = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([heading, "|" + "---|" * len(rows[0]), *lines])


def main(words: Sequence[str] | None = None) -> None:
    options = parser().parse_args(words)
    if options.command == "table":
        print(table({path.stem: json.loads(path.read_text(encoding="utf-8")) for path in options.results}))
        return
    result = measure(options)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table({options.out.stem: result}))


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = root.add_subparsers(dest="command", required=True)
    command = commands.add_parser("measure", help="teach, predict, write the figures")
    command.add_argument("data", type=Path, help="folder with cifar-100-python's or MNIST's idx files")
    command.add_argument("--unknown", type=Path, action="append", default=[], help="another set; repeatable")
    command.add_argument("--tasks", type=int, default=3)
    command.add_argument("--classes-per-task", type=int, default=10)
    command.add_argument("--train", type=int, default=20, help="training images per class, some held out")
    command.add_argument("--known", type=int, default=10, help="test images per class taught")
    command.add_argument("--unseen", type=int, default=5, help="test images per class not taught")
    command.add_argument("--holdout", type=float, default=HOLDOUT)
    command.add_argument("--backbone", default="nano")
    command.add_argument("--weights", type=Path)
    command.add_argument("--image-size", type=int)
    command.add_argument("--crop", type=float)
    command.add_argument("--preset", choices=PRESETS, default="paper")
    command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting; repeatable")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--model", type=Path, help="keep the model here after each task, and go on from there")
    command.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    table_parser = commands.add_parser("table", help="figures of several runs as Markdown")
    table_parser.add_argument("results", type=Path, nargs="+")
    return root


if __name__ == "__main__":
    main()
