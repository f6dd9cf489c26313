"""What experiments share that differ in method, settings or options of the stream: a backbone and a data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from protosteer.backbones import Backbone
from protosteer.data.labelled import Dataset
from protosteer.errors import RunError
from protosteer.evaluation import manifest
from protosteer.evaluation.run_folder import read_run
from protosteer.methods import find_method
from protosteer.streams import Benchmark, Stream, StreamOptions, find_benchmark, load_dataset, split
from protosteer.util.text import listed

if TYPE_CHECKING:
    from protosteer.evaluation.experiment import Experiment


@dataclass
class ExperimentContext:
    """Backbone and data set, which experiments share that differ in method, settings or options of the stream.

    Attributes:
        backbone: The backbone.
        benchmark: The benchmark.
        dataset: Its images.
        messages: What was reported while they were loaded.
    """

    backbone: Backbone
    benchmark: Benchmark
    dataset: Dataset
    messages: list[str]
    on_message: Callable[[str], None]
    _streams: dict[StreamOptions, Stream] = field(default_factory=dict)

    def stream(self, options: StreamOptions) -> Stream:
        """Split the data set into tasks, once for equal options."""
        if options not in self._streams:
            self._streams[options] = split(self.benchmark, self.dataset, options, self.on_message)
        return self._streams[options]

    def with_precision(self, experiment: Experiment) -> Experiment:
        """Return an experiment whose workers compute as this backbone does, whatever `auto` means to them."""
        return dataclasses.replace(experiment, precision=self.backbone.precision)

    def configuration(self, experiment: Experiment) -> dict[str, Any]:
        """Describe all that determines the experiment's results except the seed."""
        method, settings = find_method(experiment.method), experiment.settings_for(0)
        found = manifest.configuration(method, settings, self.backbone, self.stream(experiment.options))
        return found | (_learned_with(experiment.states_from, found) if experiment.states_from else {})


def _learned_with(run: Path, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under which a run learned, where an evaluation of its states has others.

    Raises:
        RunError: The run learned other images, or with another backbone (code "other-configuration").
    """
    old, _ = read_run(run)
    parts = ("checksums", "judged_on", "class_order", "tasks")
    known, found = ({**c["backbone"], **{part: c["stream"].get(part) for part in parts}} for c in (old, configuration))
    changed = manifest.differences(known, found)
    if changed:
        message = f"{run} learned with other images or weights ({listed(changed, 4)}); name those of the run"
        raise RunError(message, code="other-configuration", path=run, changed=changed)
    settings = configuration["settings"]
    learned = {**old["settings"], **old.get("learned_with", {})}  # the run may be an evaluation itself
    other = {name: value for name, value in learned.items() if settings.get(name) != value}
    return {"learned_with": other} if other else {}


def open_context(experiment: Experiment, on_message: Callable[[str], None] = lambda line: None) -> ExperimentContext:
    """Load an experiment's backbone and data set; `on_message` gets lines for the user."""
    messages: list[str] = []

    def report(line: str) -> None:
        messages.append(line)
        on_message(line)

    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)
    backbone, benchmark = experiment.load_backbone(), find_benchmark(experiment.stream)
    dataset = load_dataset(benchmark, backbone.preprocessing, experiment.data_dir, experiment.skip_unreadable, report)
    return ExperimentContext(backbone, benchmark, dataset, messages, report)
