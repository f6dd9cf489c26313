"""Experiments: from a description (stream, backbone, method, settings, seeds) to metrics."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from protosteer.backbones import NANO, Backbone
from protosteer.errors import ProtosteerError, SettingsError
from protosteer.evaluation.experiment_context import ExperimentContext, open_context
from protosteer.evaluation.loggers import LoggingReporter, find_logger
from protosteer.evaluation.seed_runs import MakeReporter, Reporter, opened, run_remotely, run_seed, warnings_to
from protosteer.methods import find_method
from protosteer.runtime.checkpoint import SECONDS
from protosteer.runtime.device import choose_device
from protosteer.runtime.executor import Executor
from protosteer.settings import Values, unknown_setting
from protosteer.streams import StreamOptions, find_benchmark
from protosteer.util.distributed import process_group


@dataclass(frozen=True)
class Experiment:
    """The description of an experiment, as `protosteer run` takes it.

    Attributes:
        stream: The benchmark's name, or `folder:PATH`.
        method: The method's name.
        backbone: The backbone's name.
        weights: A file of weights; None: by the name.
        image_size: The size of images; None: that of the weights.
        crop: The share of an image that is cropped; None: the stream's, or else that of the weights.
        seeds: The seeds; None: those of the run that is resumed, or else 0.
        preset: A preset of the method; None: its defaults.
        published: Whether to use the settings that the method's authors published for the stream.
        settings: Settings of the method; they override the preset and the published ones.
        options: Options of the stream.
        data_dir: Where datasets are; None: the default folder.
        skip_unreadable: Whether to skip images that cannot be decoded.
        device: The device.
        precision: The precision of forward passes, see `Backbone.load`; auto is fp32 if the paper is reproduced.
        threads: The number of CPU threads; None: torch's choice.
        out: The run folder; None: one under runs/.
        states_from: A run folder whose learned states are evaluated; None: learn.
    """

    stream: str
    method: str = "protosteer"
    backbone: str = NANO
    weights: Path | None = None
    image_size: int | None = None
    crop: float | None = None
    seeds: tuple[int, ...] | None = None
    preset: str | None = None
    published: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: StreamOptions = field(default_factory=StreamOptions)
    data_dir: Path | None = None
    skip_unreadable: bool = False
    device: str = "auto"
    precision: str = "auto"
    threads: int | None = None
    out: Path | None = None
    states_from: Path | None = None

    def __post_init__(self) -> None:
        if self.options.blurry or find_benchmark(self.stream).domains:
            find_method(self.method).require_repeated_classes()

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Experiment:
        """Create an experiment from one flat table of fields, stream options and settings of the method.

        Raises:
            SettingsError: A name is unknown or a value impossible.
        """
        if "stream" not in values:
            raise SettingsError("name the stream to run, for instance split-cifar100 or folder:PATH", code="no-stream")
        if "seed" in values:
            seed = values["seed"]
            raise SettingsError(f"seed = {seed}: a run has seeds, for instance seeds={seed}", code="seed-not-seeds")
        own, options = cls.hints(), get_type_hints(StreamOptions)
        hints = own | options
        typed = {name: _typed(name, v, hints[name]) for name, v in values.items() if name in hints}
        stream = StreamOptions(**{name: v for name, v in typed.items() if name in options})
        made = cls(**{name: v for name, v in typed.items() if name in own}, options=stream)
        settings = {name: v for name, v in values.items() if name not in hints}
        known = [*made.settings_for(0).to_dict(), *hints]
        for name in settings:
            if name not in known:
                raise SettingsError(
                    f"method {made.method}: {unknown_setting(name, known)}", code="unknown-setting", name=name
                )
        made = dataclasses.replace(made, settings=settings)
        made.settings_for(0)  # raises if a value is impossible
        return made

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """Return the names and types of fields, except settings and options."""
        own = get_type_hints(cls)
        del own["settings"], own["options"]
        return own

    def settings_for(self, seed: int) -> Values:
        """Return the method's settings with this seed."""
        method = find_method(self.method)
        published = published_settings(self.method, self.stream) if self.published else {}
        return method.settings_from({**method.preset(self.preset), **published, **self.settings, "seed": seed})

    @property
    def reproduces_paper(self) -> bool:
        """Whether `auto` precision must be fp32."""
        return self.settings_for(0).reproduces_paper

    @property
    def folder(self) -> Path:
        """The run folder: `out`, or one under runs/ that names stream, method and backbone."""
        if self.out is not None:
            return self.out
        name = "-".join([find_benchmark(self.stream).name, find_method(self.method).name, self.backbone])
        return Path("runs") / re.sub(r"[^\w.+-]+", "-", name)

    def load_backbone(self) -> Backbone:
        """Load the backbone on its device."""
        crop = self.crop if self.crop is not None else find_benchmark(self.stream).crop
        device, size = choose_device(self.device), self.image_size
        loaded = Backbone.load(self.backbone, self.weights, size, crop=crop, device=device, precision=self.precision)
        return loaded.with_auto_as_fp32() if self.reproduces_paper else loaded


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Return an option's value; raise if it does not have the type of its field."""
    if name == "seeds":
        return parse_seeds(value)
    wanted, *optional = get_args(hint) or (hint,)
    if value is None and optional:
        return None
    accepted: Any = {Path: (str, Path), float: (float, int)}.get(wanted, (wanted,))
    if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
        message = f"{name} = {value!r}: must be {accepted[0].__name__}, not {type(value).__name__}"
        raise SettingsError(message, code="wrong-setting-type", name=name)
    if name in ("image_size", "threads") and value < 1:
        raise SettingsError(f"{name} = {value}: must be at least 1", code="setting-out-of-bounds", name=name)
    return Path(value) if wanted is Path else value


def published_settings(method: str, stream: str) -> Mapping[str, Any]:
    """Return the settings that a method's authors published for a stream.

    Raises:
        SettingsError: There are none (code "no-published-settings").
    """
    known, name = find_method(method).published, find_benchmark(stream).name
    if name not in known:
        streams = f"only for {', '.join(known)}" if known else "for no benchmark"
        message = f"the authors of {method} publish settings {streams}; leave out published=True to use the defaults"
        raise SettingsError(message, code="no-published-settings", method=method, stream=name)
    return known[name]


def overridden(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Override a configuration; a sweep, or a way to split or order the classes, replaces what the configuration has."""
    swept = {word.partition("=")[0].strip() for word in given.get("sweep", ())}
    alternatives = (("tasks", "base", "increment", "task_file"), ("class_order", "class_orders"))
    replaced = swept.union(*(ways for ways in alternatives if any(way in given for way in ways)))
    return {**{name: value for name, value in config.items() if name not in replaced}, **given}


def parse_seeds(given: Any) -> tuple[int, ...]:
    """Parse `0,1,2`, a number, or a list of numbers."""
    words = given.split(",") if isinstance(given, str) else given
    listed = list(words) if isinstance(words, (list, tuple)) else [words]
    seeds = [int(w) if isinstance(w, str) and w.strip().isdecimal() else w for w in listed]
    if not seeds or any(type(s) is not int or s < 0 for s in seeds) or len(set(seeds)) < len(seeds):
        raise SettingsError(
            f"seeds = {given!r}: give different whole numbers from 0 on, such as 0,1,2", code="bad-seeds"
        )
    return tuple(seeds)


def check_choice(resume: bool, overwrite: bool) -> None:
    """Raise if a run is to be both resumed and overwritten."""
    if resume and overwrite:
        message = "resume=True continues the run in the folder, overwrite=True removes it; choose one"
        raise SettingsError(message, code="resume-and-overwrite")


def run_experiment(
    experiment: Experiment,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] = (),
    make_reporter: MakeReporter | None = None,
    on_message: Callable[[str], None] = lambda line: None,
    checkpoint_seconds: float = SECONDS,
    context: ExperimentContext | None = None,
    engine: Executor | None = None,
    logger: str | None = None,
) -> dict[str, Any]:
    """Run every seed that is not finished.

    Args:
        experiment: The experiment.
        resume: Continue the run in the folder.
        overwrite: Remove the run in the folder.
        command: The command line, for the manifest.
        make_reporter: Creates the reporter of progress.
        on_message: Called with lines for the user.
        checkpoint_seconds: The least time between two checkpoints of a training.
        context: Backbone and data set; None: loaded here.
        engine: Runs the seeds; None: this process, one after the other.
        logger: Where to log: "tensorboard", "wandb" or "mlflow"; None: nowhere.

    Returns:
        Metrics as `run --json` prints them.
    """
    check_choice(resume, overwrite)
    if logger:
        find_logger(logger)  # raises before any work
    context = context or open_context(experiment, on_message)
    opening = functools.partial(opened, context, resume, overwrite, command, on_message)
    if engine and engine.is_remote:
        check_local_logger(logger)
        resolved = context.with_precision(experiment)
        (outcome,) = run_remotely(engine, [resolved], opening, make_reporter, checkpoint_seconds)
        if isinstance(outcome, ProtosteerError):
            raise outcome
        return outcome
    with opening(experiment) as (folder, stream, seeds):
        runs = [f"seed {seed}" for seed in seeds]
        reporter = make_reporter(stream, runs, folder.log) if make_reporter else Reporter()
        if logger and process_group().is_rank0:
            reporter = LoggingReporter(reporter, logger, folder.path, context.configuration(experiment))
        with reporter, warnings_to(reporter.say):
            for seed in seeds:
                run_seed(experiment, context, seed, reporter, checkpoint_seconds)
        return folder.finish()


def check_local_logger(logger: str | None) -> None:
    """Raise if runs on workers, whose progress is not seen here, are to be logged."""
    if logger:
        message = "a logger follows runs in this process; run them with the local engine, or without a logger"
        raise SettingsError(message, code="remote-logger")
