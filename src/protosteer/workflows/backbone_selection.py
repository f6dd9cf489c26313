"""Choose the backbone that suits a user's own images: try every one on this disk, train none.

Each backbone embeds a sample of the images. The default classifier predicts each image by leave-one-out, in closed
form. Of the backbones within one standard error of the best, the one that computes least is chosen.

The choice does not depend on measured time. The number of images tried follows from the multiplications of the
backbones, the threads and a nominal speed of the machine. So the same images, weights, machine and threads give the
same choice.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.backbones.auto_candidates import candidates_on_disk, worth_fetching
from protosteer.backbones.build_vit import multiply_adds
from protosteer.backbones.hub import fetch_weights, may_fetch
from protosteer.backbones.precision import AUTO_PRECISION
from protosteer.backbones.registry import BackboneInfo
from protosteer.data.class_folders import rows_by_label
from protosteer.data.images import as_images, as_labelled
from protosteer.data.sources import read_labelled
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError, WeightsError
from protosteer.evidence.prototype_summary import MAX_PROTOTYPES, summarise_class
from protosteer.evidence.scorer import CoarseScorer
from protosteer.paper.task import task_seed
from protosteer.runtime.progress import OnStage, counting
from protosteer.util.system import memory_size

SECONDS = 60.0  # for all trials together, if the machine is as fast as this:
CPU_SPEED, GPU_SPEED = 15e9, 1e12  # multiplications a second, of a thread and of any other device
LEAST, MOST = 50, 1000  # images of a trial; a backbone too slow for the least is not tried
PER_CLASS = 5  # images at least, if classes have them; where they are too many, some classes are tried
COPIES = 3  # of its weights that are in memory while a backbone is loaded

# Reasons for a choice.
BEST = "the one that computes least of those within one standard error of the best"
ALONE, ONLY_TRIED = "the only one on this disk", "the only one that can be tried"
LARGEST = "the largest on this disk, since nothing can be compared without two classes and two images of one"


@dataclass(frozen=True)
class Trial:
    """The result of one backbone."""

    info: BackboneInfo
    right: int  # correct predictions of `images`, by leave-one-out
    images: int
    images_per_second: float  # decoding included; for information, no choice depends on it

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100 * self.right / self.images

    @property
    def standard_error(self) -> float:
        """Of the accuracy, in percentage points; never 0, since a few correct predictions do not mean that all are."""
        share = (self.right + 1) / (self.images + 2)
        return 100 * math.sqrt(share * (1 - share) / (self.images + 3))


@dataclass(frozen=True)
class Choice:
    """The chosen backbone, the reason, and all trials."""

    info: BackboneInfo
    why: str
    trials: tuple[Trial, ...] = ()  # empty if there was one backbone, or nothing to compare by
    left_out: dict[str, str] = field(default_factory=dict)  # what was not tried, and why

    def load(self, device: str | torch.device = "cpu", precision: str = AUTO_PRECISION) -> Backbone:
        """Load the backbone."""
        return Backbone.load(self.info.name, device=device, precision=precision)


def choose_backbone(
    data: Any,
    device: str | torch.device = "cpu",
    fetch: bool = False,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
    on_stage: OnStage | None = None,
    precision: str = AUTO_PRECISION,
) -> Choice:
    """Choose the backbone that suits labelled images, by leave-one-out accuracy without training.

    Args:
        data: What `Learner.learn` takes.
        device: Where to embed.
        fetch: Also try a few small backbones that are not on this disk, unless HF_HUB_OFFLINE is set. No image leaves
            the machine.
        seed: Draws the sample of images.
        say: Is given a line before a download, and one about each backbone that cannot be downloaded.
        on_stage: Is given the progress.
        precision: Of the forward passes.

    Returns:
        The choice, with all trials.

    Raises:
        DataError: There are no images (code "no-images").
    """
    images, labels = _split_data(data)
    if not labels:
        raise DataError("there are no images to choose a backbone by", code="no-images")
    count, counts = len(labels), Counter(labels)
    candidates, left_out = candidates_on_disk()
    speed = nominal_speed(device)
    backbones = affordable(candidates, count, speed, left_out)
    comparable = len(counts) > 1 and max(counts.values()) > 1
    if comparable and fetch and may_fetch():
        backbones = _with_fetched(backbones, count, speed, left_out, say)
    if len(backbones) == 1:
        return Choice(backbones[0], ONLY_TRIED if left_out else ALONE, (), left_out)
    if not comparable:
        return Choice(max(backbones, key=_cost), LARGEST, (), left_out)
    in_time = int(SECONDS * speed / sum(map(_cost, backbones)))  # images that all of them can embed
    rows = sample(labels, max(LEAST, min(MOST, in_time)), seed)
    trials: list[Trial] = []
    for info in sorted(backbones, key=_cost):
        try:
            trials.append(_try(info, images, labels, rows, device, on_stage, precision))
        except WeightsError as error:
            left_out[info.alias] = str(error)
    return Choice(select_trial(trials).info, BEST, tuple(trials), left_out)


def select_trial(trials: Sequence[Trial]) -> Trial:
    """Return the cheapest trial within one standard error of the most accurate one."""
    leader = max(trials, key=lambda trial: trial.right)
    contenders = [trial for trial in trials if trial.accuracy >= leader.accuracy - leader.standard_error]
    return min(contenders, key=lambda trial: (_cost(trial.info), -trial.right))


def nominal_speed(device: str | torch.device) -> float:
    """Return the multiplications per second to plan with, however busy the machine is."""
    return GPU_SPEED if torch.device(device).type != "cpu" else CPU_SPEED * torch.get_num_threads()


def affordable(
    candidates: Sequence[BackboneInfo],
    images: int,
    speed: float,
    left_out: dict[str, str],
    base: Sequence[BackboneInfo] = (),
) -> list[BackboneInfo]:
    """Return `base` and the candidates that time and memory allow, the smallest first; add the others to `left_out`."""
    selection = list(base)
    for info in sorted(candidates, key=_cost):
        if 4 * COPIES * info.parameters > memory_size():
            left_out[info.alias] = "too large for the memory of this machine"
        elif selection and SECONDS * speed < min(LEAST, images) * sum(map(_cost, [*selection, info])):
            left_out[info.alias] = "too slow to be tried here, beside the others, within a minute"
        else:
            selection.append(info)
    return selection


def sample(labels: Sequence[str], limit: int, seed: int = 0) -> list[int]:
    """Draw at most `limit` rows, equally many of each class as far as it has them."""
    rows = rows_by_label(labels)
    names = sorted(rows)
    classes = min(len(names), limit // PER_CLASS)
    class_names = [names[i] for i in _order(len(names), task_seed(seed, names))[:classes]]
    per_class = min(MAX_PROTOTYPES, limit // classes)  # no more than a class summary keeps as single images
    draws: list[int] = []
    for name in class_names:
        class_rows = rows[name]
        draws += [class_rows[i] for i in _order(len(class_rows), task_seed(seed, [name]))[:per_class]]
    return sorted(draws)


def count_loo_correct(embeddings: Tensor, labels: Sequence[str]) -> tuple[int, int]:
    """Count the embeddings [n, D] or [n, S, D] that leave-one-out predicts correctly, and all that it predicts."""
    names = sorted(set(labels))
    owners = torch.tensor([names.index(label) for label in labels])
    scorer = CoarseScorer([summarise_class(embeddings[owners == i]) for i in range(len(names))])
    scores, _ = scorer.loo_scores()  # [m, C]
    loo_labels = scorer.statistics.loo_labels
    return int((scores.argmax(dim=1) == loo_labels).sum()), len(loo_labels)


def _split_data(data: Any) -> tuple[Any, list[str]]:
    """Return the images, which any backbone can read, and their labels."""
    if isinstance(data, (str, os.PathLike)):
        files = read_labelled(Path(data))
        return files.paths, files.labels
    _, labels = as_labelled(data, Preprocessing(224, (0.5,) * 3, (0.5,) * 3))  # no image is read
    return data[0] if isinstance(data, tuple) else data, labels


def _try(
    info: BackboneInfo,
    data: Any,
    labels: Sequence[str],
    rows: Sequence[int],
    device: str | torch.device,
    on_stage: OnStage | None,
    precision: str,
) -> Trial:
    backbone = Backbone.load(info.name, device=device, precision=precision)
    images = as_images(data, backbone.preprocessing)
    on_batch = counting(on_stage, "", f"trying {info.alias}", len(rows))
    backbone.embed_set(images, rows=rows[:1])  # the first image takes longer than others
    began = time.perf_counter()
    embeddings = backbone.reading("several").embed_set(images, on_batch=on_batch, rows=rows)
    seconds = time.perf_counter() - began
    correct, of = count_loo_correct(embeddings.unflatten(1, (-1, backbone.dim)), [labels[row] for row in rows])
    return Trial(info, correct, of, len(rows) / seconds)


def _with_fetched(
    backbones: list[BackboneInfo], images: int, speed: float, left_out: dict[str, str], say: Callable[[str], None]
) -> list[BackboneInfo]:
    """Return `backbones` and the small backbones that this machine is fast enough for and that could be downloaded."""
    for info in affordable(worth_fetching(), images, speed, left_out, backbones)[len(backbones) :]:
        about = f"{info.name}, {4 * info.parameters / 1e6:.0f} MB, {info.licence}"
        say(f"fetching {info.alias} ({about}) to try it; HF_HUB_OFFLINE=1 fetches nothing")
        try:
            backbones = [*backbones, replace(info, path=fetch_weights(info.name))]
        except WeightsError as error:
            cause = type(error.__cause__).__name__
            say(f"{info.alias} cannot be fetched ({cause}); only what is on this disk is tried")
            break  # the others would come from the same place
    return backbones


def _cost(info: BackboneInfo) -> int:
    return multiply_adds(info.config)


def _order(count: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order
