"""Experiments: from a description (stream, backbone, method, settings, seeds) to metrics."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from protosteer.backbones import NANO, Backbone
from protosteer.data.labelled import Dataset
from protosteer.errors import ProtosteerError, ProtosteerWarning, RunError, SettingsError
from protosteer.evaluation import manifest
from protosteer.evaluation.loggers import LoggingReporter, find_logger
from protosteer.evaluation.protocol import Run, run_stream
from protosteer.evaluation.run_folder import METRICS, RunFolder, SeedFolder, read_run
from protosteer.methods import find_method
from protosteer.runtime.checkpoint import SECONDS
from protosteer.runtime.device import choose_device
from protosteer.runtime.executor import Executor, Job
from protosteer.runtime.progress import Stage
from protosteer.settings import Values, unknown_setting
from protosteer.streams import Benchmark, Stream, StreamOptions, find_benchmark, load_dataset, split
from protosteer.util.distributed import process_group
from protosteer.util.files import replacing, writing
from protosteer.util.text import listed, one_line


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
        streams = f"only for {', '.join(known)}" if known else "for no stream"
        message = f"method {method} has published settings {streams}, not for {name}; leave published out"
        raise SettingsError(message, code="no-published-settings", method=method, stream=name)
    return known[name]


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
    other = {name: value for name, value in old["settings"].items() if settings.get(name) != value}
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
        with reporter, _warnings_to(reporter.say):
            for seed in seeds:
                _run_seed(experiment, context, seed, reporter, checkpoint_seconds)
        return folder.finish()


def check_local_logger(logger: str | None) -> None:
    """Raise if runs on workers, whose progress is not seen here, are to be logged."""
    if logger:
        message = "a logger follows runs in this process; run them with the local engine, or without a logger"
        raise SettingsError(message, code="remote-logger")


@contextmanager
def opened(
    context: ExperimentContext,
    resume: bool,
    overwrite: bool,
    command: Sequence[str],
    on_message: Callable[[str], None],
    experiment: Experiment,
) -> Iterator[tuple[RunFolder, Stream, list[int]]]:
    """Lock an experiment's folder and write its manifest; yields the folder, the stream and the seeds to run."""
    folder, configuration = RunFolder(experiment.folder), context.configuration(experiment)
    with writing(folder.path, "out="), folder.locked():
        now = manifest.circumstances(context.backbone.device)
        seeds, lines = folder.open(configuration, now, command, experiment.seeds, resume, overwrite)
        for line in lines:
            on_message(line)
        for line in (" ".join(command), *context.messages, *lines):
            folder.log(line)
        yield folder, context.stream(experiment.options), seeds


def _run_seed(
    experiment: Experiment, context: ExperimentContext, seed: int, reporter: Any, checkpoint_seconds: float
) -> None:
    folder, stream = RunFolder(experiment.folder), context.stream(experiment.options)
    method = find_method(experiment.method)(context.backbone, experiment.settings_for(seed))
    store = SeedFolder(folder.seed(seed), method.suffix, checkpoint_seconds)
    if folder.finished(seed):
        reporter.begin(f"seed {seed}", "finished already", len(stream))
    else:
        if experiment.states_from:
            store.copy_learned(RunFolder(experiment.states_from).seed(seed))
        done = len(store.rows())
        start = f"{method.name}, resumes after task {done}" if done else method.name
        reporter.begin(f"seed {seed}", f"{start}, {len(stream)} tasks, {len(stream.classes)} classes", done)
        run = run_stream(method, stream, reporter.on_stage, reporter.on_task, store)
        store.finish({"seed": seed, **run.to_dict()})
    store.clean()


def run_remotely(
    engine: Executor,
    experiments: Sequence[Experiment],
    opening: Callable[[Experiment], Any],
    make_reporter: MakeReporter | None,
    checkpoint_seconds: float,
) -> list[dict[str, Any] | ProtosteerError]:
    """Run the unfinished seeds of experiments on workers; their progress is read from their folders.

    Returns the metrics of each experiment. Of several experiments, one that fails does not stop the others, and its
    error is returned.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(opening(experiment)) for experiment in experiments]
        folders = [folder for folder, _, _ in opened]
        slots = [(k, seed) for k, (_, _, seeds) in enumerate(opened) for seed in seeds]
        suffixes = [find_method(experiment.method).suffix for experiment in experiments]
        total = sum(len(opened[k][1]) for k, _ in slots)

        def log(line: str) -> None:
            for folder in folders:
                folder.log(line)

        def name(k: int, seed: int) -> str:
            return f"{experiments[k].folder.name}, seed {seed}" if len(experiments) > 1 else f"seed {seed}"

        def done_tasks(k: int, seed: int) -> int:
            store = SeedFolder(folders[k].seed(seed), suffixes[k])
            return len(opened[k][1]) if folders[k].finished(seed) else len(store.rows())

        def on_wait() -> None:
            with suppress(RunError):  # a file is gone because its seed has just been finished
                done = sum(done_tasks(*slot) for slot in slots)
                if done:  # before that, the time is unknown
                    reporter.on_stage(Stage("", f"tasks of {len(slots)} seeds", done, total))

        def on_done(job: Job, error: ProtosteerError | None) -> None:
            reporter.say(f"{job.name}: {error or 'done'}")
            if error:
                failed[experiments.index(job.arguments[0])] = error

        failed: dict[int, ProtosteerError] = {}
        jobs = [Job(name(k, s), (experiments[k], s)) for k, s in slots if not folders[k].finished(s)]
        reporter = make_reporter(opened[0][1], [name(*slot) for slot in slots], log) if make_reporter else Reporter()
        make = functools.partial(_remote_work, checkpoint_seconds, len(experiments) > 1)
        with reporter, _warnings_to(reporter.say):
            engine.run(make, jobs, on_done, on_wait)
        return [failed[k] if k in failed else folder.finish() for k, folder in enumerate(folders)]


def _remote_work(checkpoint_seconds: float, returns_errors: bool) -> Callable[[Experiment, int], Any]:
    """Make the function that runs a seed in a worker, whose experiments share a context."""
    context: ExperimentContext | None = None

    def work(experiment: Experiment, seed: int) -> ProtosteerError | None:
        nonlocal context
        context = context or open_context(experiment)
        place = RunFolder(experiment.folder).seed(seed)
        try:
            with writing(place, "out="):
                place.mkdir(parents=True, exist_ok=True)
                with replacing(place / METRICS):  # a worker of a killed process may still be writing
                    _run_seed(experiment, context, seed, Reporter(), checkpoint_seconds)
        except ProtosteerError as error:
            if not returns_errors:
                raise
            return error
        return None

    return work


@contextmanager
def _warnings_to(say: Callable[[str], None]) -> Iterator[None]:
    """Turn warnings into messages; ours are always shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", ProtosteerWarning)
        warnings.showwarning = lambda message, *rest, **more: say(f"warning: {one_line(str(message))}")
        yield
