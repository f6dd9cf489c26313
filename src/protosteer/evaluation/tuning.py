"""Tune a method on validation images of the first task alone: the same small search for every method.

Later tasks and all test images stay unknown, as they would be in life. A method's file has its grid, `Method.grid`. Its
defaults are tried first and win ties.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from protosteer.errors import SettingsError
from protosteer.evaluation.experiment import Experiment
from protosteer.evaluation.experiment_context import ExperimentContext, open_context
from protosteer.evaluation.protocol import run_stream
from protosteer.methods import find_method
from protosteer.runtime.progress import OnStage
from protosteer.streams import Stream

SHARE = 0.2  # of the training images, for validation


@dataclass(frozen=True)
class Trial:
    """Settings that were tried, and their accuracy in percent on the validation images, mean over seeds."""

    settings: Mapping[str, Any]
    accuracy: float


def tune(
    experiment: Experiment,
    grid: Mapping[str, tuple[Any, ...]] | None = None,
    on_trial: Callable[[int, int, Trial], None] = lambda i, trials, trial: None,
    on_stage: OnStage | None = None,
    context: ExperimentContext | None = None,
) -> list[Trial]:
    """Try every point of a method's grid on the first task.

    Args:
        experiment: Stream, backbone, method, and settings that the grid does not change.
        grid: Values of each setting; None: the method's own grid.
        on_trial: Called after each trial with its number, the number of trials, and the trial.
        on_stage: Called with progress.
        context: Backbone and data set; None: loaded here.

    Returns:
        All trials, the best first.

    Raises:
        SettingsError: The method has no grid (code "no-grid").
    """
    method = find_method(experiment.method)
    axes = method.grid if grid is None else grid
    if not axes:
        message = f"method {method.name} has no grid to search; name values, such as temperature=0.2,0.6"
        raise SettingsError(message, code="no-grid", method=method.name)
    options = experiment.options
    options = dataclasses.replace(options, validation=options.validation or SHARE)
    context = context or open_context(experiment)
    stream = context.stream(options)
    first = Stream(stream.name, stream[:1], stream.about)
    default = experiment.settings_for(0).to_dict()
    points = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    own = {name: default[name] for name in axes}
    points = [own, *(point for point in points if point != own)]
    for point in points:  # raises before anything is trained
        experiment.settings_for(0).replace(**point)
    trials = []
    for i, point in enumerate(points, 1):
        accuracies = []
        for seed in experiment.seeds or (0,):
            learner = method(context.backbone, experiment.settings_for(seed).replace(**point))
            accuracies.append(run_stream(learner, first, on_stage, diagnosed=False).figures()["last_image_accuracy"])
        trials.append(Trial(point, statistics.fmean(accuracies)))
        on_trial(i, len(points), trials[-1])
    return sorted(trials, key=lambda trial: -trial.accuracy)
