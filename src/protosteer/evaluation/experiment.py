"""An experiment from its description to its figures: stream, backbone, method, settings, seeds."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from protosteer.backbones import NANO, Backbone
from protosteer.errors import ProtosteerWarning, SettingsError
from protosteer.evaluation import manifest
from protosteer.evaluation.protocol import Run, run_stream
from protosteer.evaluation.runs import RunFolder
from protosteer.methods import Method, find_method
from protosteer.running.devices import choose_device
from protosteer.running.progress import Stage
from protosteer.running.resume import SECONDS
from protosteer.settings import Values, unknown_setting
from protosteer.streams import Stream, StreamOptions, find_benchmark, open_stream
from protosteer.util.files import writing

_STREAM_OPTIONS = tuple(f.name for f in dataclasses.fields(StreamOptions))
# Of what may come from a file; the rest of a stream's options and a method's settings look after themselves.
_TYPES: dict[str, tuple[type[Any], ...]] = {
    "stream": (str,), "method": (str,), "backbone": (str,), "device": (str,), "class_order": (str,),
    "preset": (str,), "precision": (str,),
    "weights": (str, Path), "data_dir": (str, Path), "out": (str, Path), "task_file": (str, Path),
    "image_size": (int,), "threads": (int,), "crop": (float, int), "skip_unreadable": (bool,),
}  # fmt: skip


class Reporter:
    """Hears what a run is doing; this one says nothing."""

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *error: object) -> None: ...
    def begin(self, name: str, about: str, done_tasks: int = 0) -> None: ...
    def on_stage(self, stage: Stage) -> None: ...
    def on_task(self, i: int, run: Run) -> None: ...
    def say(self, line: str) -> None: ...


# Makes a reporter for a stream, given the names of its runs, and where lines are logged.
MakeReporter = Callable[[Stream, Sequence[str], Callable[[str], None]], Any]


@dataclass(frozen=True)
class Experiment:
    """What `protosteer run` is told. `settings` belong to the method, `options` to the stream.

    A preset stands for settings that depend on the backbone's depth; settings that are given win over it.
    """

    stream: str
    method: str = "cpp"
    backbone: str = NANO
    weights: Path | None = None
    image_size: int | None = None
    crop: float | None = None  # None: the stream's own, or else the weights'
    seeds: tuple[int, ...] | None = None  # None: those of the run that is resumed, or else 0
    preset: str = "paper"
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: StreamOptions = field(default_factory=StreamOptions)
    data_dir: Path | None = None
    skip_unreadable: bool = False
    device: str = "auto"
    precision: str = "auto"
    threads: int | None = None
    out: Path | None = None

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Experiment:
        """From one flat table of names: those of a run, a stream's options and the method's settings."""
        own = [f.name for f in dataclasses.fields(cls) if f.name not in ("settings", "options")]
        plain: dict[str, Any] = {name: _typed(name, value) for name, value in values.items()}
        if "stream" not in plain:
            raise SettingsError("say which stream to run, for instance split-cifar100 or folder:PATH")
        if "seed" in plain:
            raise SettingsError(
                f"seed = {plain['seed']}: a run has seeds, for instance seeds={plain['seed']}"
            )
        options = StreamOptions(**{name: v for name, v in plain.items() if name in _STREAM_OPTIONS})
        made = cls(**{name: v for name, v in plain.items() if name in own}, options=options)
        settings = {name: v for name, v in plain.items() if name not in own and name not in _STREAM_OPTIONS}
        known = [*made.settings_for(0).to_dict(), *own, *_STREAM_OPTIONS]
        for name in settings:
            if name not in known:
                raise SettingsError(f"method {made.method}: {unknown_setting(name, known)}")
        made = dataclasses.replace(made, settings=settings)
        made.settings_for(0)  # complains of what the method does not know
        return made

    def settings_for(self, seed: int, depth: int = 12) -> Values:
        """Settings of the method, on a backbone of so many layers: a preset looks at it."""
        method = find_method(self.method)
        return method.settings_from({**method.preset(self.preset, depth), **self.settings, "seed": seed})

    @property
    def folder(self) -> Path:
        """`out`, or a folder under runs/ that tells stream, method and backbone apart."""
        if self.out is not None:
            return self.out
        name = "-".join([find_benchmark(self.stream).name, self.method, self.backbone])
        return Path("runs") / re.sub(r"[^\w.-]+", "-", name)

    def load_backbone(self) -> Backbone:
        crop = self.crop if self.crop is not None else find_benchmark(self.stream).crop
        return Backbone.load(
            self.backbone,
            weights=self.weights,
            image_size=self.image_size,
            crop=crop,
            device=choose_device(self.device),
            precision=self.precision,
        )


def _typed(name: str, value: Any) -> Any:
    """The value of a run's own option, refused if it is of a wrong kind."""
    if name == "seeds":
        return parse_seeds(value)
    wanted = _TYPES.get(name)
    if wanted is None or value is None:
        return value
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise SettingsError(f"{name} = {value!r}: must be {wanted[0].__name__}, not {type(value).__name__}")
    if isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise SettingsError(f"{name} = {value}: must be at least 1")
    return Path(value) if isinstance(value, (str, Path)) and Path in wanted else value


def overridden(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given wins; another way of sharing out the classes takes the place of the file's."""
    ways = ("tasks", "base", "increment", "task_file")
    beaten = ways if any(way in given for way in ways) else ()
    return {**{name: value for name, value in config.items() if name not in beaten}, **given}


def parse_seeds(given: Any) -> tuple[int, ...]:
    """`0,1,2`, a number, or a list of numbers."""
    words = given.split(",") if isinstance(given, str) else given
    listed = list(words) if isinstance(words, (list, tuple)) else [words]
    seeds = [int(w) if isinstance(w, str) and w.strip().isdecimal() else w for w in listed]
    if not seeds or any(type(s) is not int or s < 0 for s in seeds) or len(set(seeds)) < len(seeds):
        raise SettingsError(f"seeds = {given!r}: give different whole numbers from 0 on, such as 0,1,2")
    return tuple(seeds)


def run_experiment(
    experiment: Experiment,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] = (),
    make_reporter: MakeReporter | None = None,
    on_message: Callable[[str], None] = lambda line: None,
    bookmark_seconds: float = SECONDS,
) -> dict[str, Any]:
    """Run every seed that is not done yet; returns the figures as `run --json` prints them."""
    if resume and overwrite:
        raise SettingsError(
            "resume=True goes on with the run in the folder, overwrite=True removes it; choose one"
        )
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)
    said: list[str] = []

    def tell(line: str) -> None:
        said.append(line)
        on_message(line)

    method_class = find_method(experiment.method)
    backbone = experiment.load_backbone()
    stream = open_stream(
        experiment.stream,
        experiment.options,
        backbone.preprocessing,
        experiment.data_dir,
        experiment.skip_unreadable,
        tell,
    )
    folder = RunFolder(experiment.folder)
    with writing(folder.path, "out="), folder.locked():
        settings = experiment.settings_for(0, backbone.depth)
        configuration = manifest.configuration(method_class, settings, backbone, stream)
        now = manifest.circumstances(backbone.device)
        seeds, lines = folder.open(configuration, now, command, experiment.seeds, resume, overwrite)
        for line in lines:
            tell(line)
        methods = {
            seed: method_class(backbone, experiment.settings_for(seed, backbone.depth)) for seed in seeds
        }
        for line in (" ".join(command), *said):
            folder.log(line)
        runs = [f"seed {seed}" for seed in methods]
        reporter = make_reporter(stream, runs, folder.log) if make_reporter else Reporter()
        with reporter, _warnings_to(reporter.say):
            for seed, method in methods.items():
                _run_seed(folder, seed, method, stream, reporter, bookmark_seconds)
        return folder.finish()


def _run_seed(
    folder: RunFolder, seed: int, method: Method, stream: Stream, reporter: Any, bookmark_seconds: float
) -> None:
    store = folder.seed(seed, method.suffix, bookmark_seconds)
    name = f"seed {seed}"
    if store.figures() is not None:
        store.clean()
        reporter.begin(name, "done already", len(stream))
        return
    rows = store.rows()
    again = f"{method.name}, goes on after task {len(rows)}" if rows else method.name
    reporter.begin(name, f"{again}, {len(stream)} tasks, {len(stream.classes)} classes", len(rows))
    run = run_stream(method, stream, reporter.on_stage, reporter.on_task, store)
    store.finish(seed, run)


@contextmanager
def _warnings_to(say: Callable[[str], None]) -> Iterator[None]:
    """Warnings on purpose become lines of the report and of the log."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def tell(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, ProtosteerWarning):
                say(f"warning: {message}")
            else:
                show(message, category, *rest, **more)

        warnings.simplefilter("always", ProtosteerWarning)
        warnings.showwarning = tell
        yield
