"""Experiments: from a description (stream, backbone, method, settings, seeds) to metrics."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from protosteer.backbones import NANO, Backbone
from protosteer.errors import ProtosteerWarning, RunError, SettingsError
from protosteer.evaluation import manifest
from protosteer.evaluation.protocol import Run, run_stream
from protosteer.evaluation.run_folder import METRICS, RunFolder, SeedFolder
from protosteer.methods import Method, find_method
from protosteer.runtime.checkpoint import SECONDS
from protosteer.runtime.device import choose_device
from protosteer.runtime.executor import Executor, Job
from protosteer.runtime.progress import Stage
from protosteer.settings import Values, unknown_setting
from protosteer.streams import Stream, StreamOptions, find_benchmark, open_stream
from protosteer.util.files import replacing, writing
from protosteer.util.text import one_line


class Reporter:
    """Receives the progress of a run; this one shows nothing."""

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *error: object) -> None: ...

    def begin(self, name: str, about: str, done_tasks: int = 0) -> None:
        """Start a run of which some tasks are done."""

    def on_stage(self, stage: Stage) -> None:
        """Report progress within a task."""

    def on_task(self, i: int, run: Run) -> None:
        """Report the results after task i."""

    def say(self, line: str) -> None:
        """Show a message."""


# Creates a reporter from a stream, the names of its runs, and a function that logs a line.
MakeReporter = Callable[[Stream, Sequence[str], Callable[[str], None]], Any]


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
        settings: Settings of the method; they override the preset.
        options: Options of the stream.
        data_dir: Where datasets are; None: the default folder.
        skip_unreadable: Whether to skip images that cannot be decoded.
        device: The device.
        precision: The precision of forward passes, see `Backbone.load`; auto is fp32 if the paper is reproduced.
        threads: The number of CPU threads; None: torch's choice.
        out: The run folder; None: one under runs/.
    """

    stream: str
    method: str = "protosteer"
    backbone: str = NANO
    weights: Path | None = None
    image_size: int | None = None
    crop: float | None = None
    seeds: tuple[int, ...] | None = None
    preset: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: StreamOptions = field(default_factory=StreamOptions)
    data_dir: Path | None = None
    skip_unreadable: bool = False
    device: str = "auto"
    precision: str = "auto"
    threads: int | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.options.blurry:
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
        return method.settings_from({**method.preset(self.preset), **self.settings, "seed": seed})

    @property
    def reproduces_paper(self) -> bool:
        """Whether `auto` precision must be fp32."""
        return self.settings_for(0).reproduces_paper

    @property
    def folder(self) -> Path:
        """The run folder: `out`, or one under runs/ that names stream, method and backbone."""
        if self.out is not None:
            return self.out
        name = "-".join([find_benchmark(self.stream).name, self.method, self.backbone])
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


def overridden(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Override a configuration; a given way to split the classes replaces the configuration's."""
    ways = ("tasks", "base", "increment", "task_file")
    replaced = ways if any(way in given for way in ways) else ()
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


@dataclass(frozen=True)
class ExperimentContext:
    """Backbone, stream, and what was reported when it was opened.

    Experiments that differ only in their method may share it.
    """

    backbone: Backbone
    stream: Stream
    messages: tuple[str, ...] = ()

    def configuration(self, experiment: Experiment) -> dict[str, Any]:
        """Describe all that determines the experiment's results except the seed."""
        settings = experiment.settings_for(0)
        return manifest.configuration(find_method(experiment.method), settings, self.backbone, self.stream)


def open_context(experiment: Experiment, on_message: Callable[[str], None] = lambda line: None) -> ExperimentContext:
    """Load an experiment's backbone and stream; `on_message` gets lines for the user."""
    messages: list[str] = []

    def report(line: str) -> None:
        messages.append(line)
        on_message(line)

    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)
    backbone = experiment.load_backbone()
    stream = open_stream(
        experiment.stream,
        experiment.options,
        backbone.preprocessing,
        experiment.data_dir,
        experiment.skip_unreadable,
        report,
    )
    return ExperimentContext(backbone, stream, tuple(messages))


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
        context: Backbone and stream; None: loaded here.
        engine: Runs the seeds; None: this process, one after the other.

    Returns:
        Metrics as `run --json` prints them.
    """
    check_choice(resume, overwrite)
    context = context or open_context(experiment, on_message)
    stream, folder = context.stream, RunFolder(experiment.folder)
    with writing(folder.path, "out="), folder.locked():
        now = manifest.circumstances(context.backbone.device)
        configuration = context.configuration(experiment)
        seeds, lines = folder.open(configuration, now, command, experiment.seeds, resume, overwrite)
        for line in lines:
            on_message(line)
        for line in (" ".join(command), *context.messages, *lines):
            folder.log(line)
        runs = [f"seed {seed}" for seed in seeds]
        reporter = make_reporter(stream, runs, folder.log) if make_reporter else Reporter()
        with reporter, _warnings_to(reporter.say):
            if engine and engine.is_remote:
                resolved = dataclasses.replace(experiment, precision=context.backbone.precision)
                _run_remotely(engine, resolved, seeds, len(stream), reporter, checkpoint_seconds)
            else:
                run = _seed_runner(experiment, context, reporter, checkpoint_seconds)
                for seed in seeds:
                    run(seed)
        return folder.finish()


def _seed_runner(
    experiment: Experiment, context: ExperimentContext, reporter: Any, checkpoint_seconds: float
) -> Callable[[int], None]:
    folder, method_class, stream = (RunFolder(experiment.folder), find_method(experiment.method), context.stream)

    def run(seed: int) -> None:
        method = method_class(context.backbone, experiment.settings_for(seed))
        store = SeedFolder(folder.seed(seed), method.suffix, checkpoint_seconds)
        if folder.finished(seed):
            reporter.begin(f"seed {seed}", "finished already", len(stream))
        else:
            _run_seed(seed, method, stream, reporter, store)
        store.clean()

    return run


def _run_seed(seed: int, method: Method, stream: Stream, reporter: Any, store: SeedFolder) -> None:
    done = len(store.rows())
    start = f"{method.name}, resumes after task {done}" if done else method.name
    reporter.begin(f"seed {seed}", f"{start}, {len(stream)} tasks, {len(stream.classes)} classes", done)
    run = run_stream(method, stream, reporter.on_stage, reporter.on_task, store)
    store.finish({"seed": seed, **run.to_dict()})


def _run_remotely(
    engine: Executor, experiment: Experiment, seeds: Sequence[int], tasks: int, reporter: Any, checkpoint_seconds: float
) -> None:
    """Run the unfinished seeds on workers; their progress is read from their folders."""
    folder = RunFolder(experiment.folder)
    suffix = find_method(experiment.method).suffix

    def on_wait() -> None:
        with suppress(RunError):  # a file is gone because its seed has just been finished
            rows = [SeedFolder(folder.seed(seed), suffix).rows() for seed in seeds]
            done = sum(tasks if folder.finished(s) else len(r) for s, r in zip(seeds, rows, strict=True))
            if done:  # before that, the time is unknown
                reporter.on_stage(Stage("", f"tasks of {len(seeds)} seeds", done, tasks * len(seeds)))

    jobs = [Job(f"seed {seed}", (seed,)) for seed in seeds if not folder.finished(seed)]
    make = functools.partial(_remote_seed_runner, experiment, checkpoint_seconds)
    engine.run(make, jobs, lambda job, _: reporter.say(f"{job.name}: done"), on_wait)


def _remote_seed_runner(experiment: Experiment, checkpoint_seconds: float) -> Callable[[int], None]:
    run = _seed_runner(experiment, open_context(experiment), Reporter(), checkpoint_seconds)

    def work(seed: int) -> None:
        place = RunFolder(experiment.folder).seed(seed)
        with writing(place, "out="):
            place.mkdir(parents=True, exist_ok=True)
            with replacing(place / METRICS):  # a worker of a killed process may still be writing
                run(seed)

    return work


@contextmanager
def _warnings_to(say: Callable[[str], None]) -> Iterator[None]:
    """Turn warnings into messages; ours are always shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", ProtosteerWarning)
        warnings.showwarning = lambda message, *rest, **more: say(f"warning: {one_line(str(message))}")
        yield
