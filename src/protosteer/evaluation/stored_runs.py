"""Open what a finished run left behind: its images again, its learned model, and embeddings of its test images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protosteer.data.datasets.registry import list_datasets
from protosteer.data.transforms import Preprocessing
from protosteer.errors import ProtosteerError
from protosteer.evaluation.experiment import Experiment
from protosteer.evaluation.reevaluation import run_values
from protosteer.learner import Learner
from protosteer.streams import Stream, find_benchmark, open_stream
from protosteer.streams.folder import DOMAINS, PREFIX

MAX_POINTS = 1000  # embeddings of test images; more are chosen evenly


def open_run_stream(folder: Path, configuration: Mapping[str, Any], data_dir: Path | None = None) -> Stream | None:
    """Open the images of a run again; None if they are not on this disk. Nothing is downloaded.

    Args:
        folder: The run folder.
        configuration: The configuration in its manifest.
        data_dir: Where data sets are; None: the default folder.
    """
    name = configuration["stream"]["name"]
    if name.startswith((PREFIX, DOMAINS)):  # the manifest does not have the path
        return None
    try:
        benchmark = find_benchmark(name)
        here = {status.info.name for status in list_datasets(data_dir) if status.path is not None}
        if not benchmark.load and not set(benchmark.datasets) <= here:
            return None
        experiment = Experiment.from_values(run_values(folder, configuration))
        preprocessing = Preprocessing(**configuration["backbone"]["preprocessing"])
        return open_stream(name, experiment.options, preprocessing, data_dir, on_message=lambda line: None)
    except ProtosteerError:
        return None


def load_learner(experiment: Experiment, seed: int) -> Learner | None:
    """Load the model that a run's seed has learned after its last task; None if it stores no model file."""
    files = sorted((experiment.folder / f"seed-{seed}").glob("task-*.protosteer"))
    return Learner.load(files[-1], experiment.load_backbone()) if files else None


def test_embeddings(learner: Learner, stream: Stream, most: int = MAX_POINTS) -> tuple[Tensor, Tensor, list[str]]:
    """Embed a stream's test images, or `most` of them: without a prompt, and as they were matched, [N, D] each.

    Returns:
        Both embeddings, and the class of each image.
    """
    pixels = torch.cat([task.test.pixels(range(len(task.test))) for task in stream])
    labels = [label for task in stream for label in task.test_labels]
    rows = torch.linspace(0, len(labels) - 1, min(len(labels), most)).round().long()
    before = learner.backbone.embed_pixels(pixels[rows], batch_size=learner.settings.embed_batch_size)
    after = learner.predict(pixels[rows]).embeddings
    return before, after, [labels[row] for row in rows.tolist()]
