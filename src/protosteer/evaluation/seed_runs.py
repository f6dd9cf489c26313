"""Run the seeds of experiments: in this process, or on workers whose progress is read from their folders."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from protosteer.errors import ProtosteerError, ProtosteerWarning, RunError
from protosteer.evaluation import manifest
from protosteer.evaluation.experiment_context import ExperimentContext, open_context
from protosteer.evaluation.protocol import Run, run_stream
from protosteer.evaluation.run_folder import RunFolder
from protosteer.evaluation.seed_folder import METRICS, SeedFolder
from protosteer.methods import find_method
from protosteer.runtime.executor import Executor, Job
from protosteer.runtime.progress import Stage
from protosteer.streams import Stream
from protosteer.util.files import replacing, writing
from protosteer.util.text import counted, one_line

if TYPE_CHECKING:
    from protosteer.evaluation.experiment import Experiment


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


def run_seed(
    experiment: Experiment, context: ExperimentContext, seed: int, reporter: Any, checkpoint_seconds: float
) -> None:
    """Run one seed that is not finished, or resume it."""
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
        tasks, classes = counted(len(stream), "task"), counted(len(stream.classes), "class")
        reporter.begin(f"seed {seed}", f"{start}, {tasks}, {classes}", done)
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
        with reporter, warnings_to(reporter.say):
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
                    run_seed(experiment, context, seed, Reporter(), checkpoint_seconds)
        except ProtosteerError as error:
            if not returns_errors:
                raise
            return error
        return None

    return work


@contextmanager
def warnings_to(say: Callable[[str], None]) -> Iterator[None]:
    """Turn warnings into messages; ours are always shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", ProtosteerWarning)
        warnings.showwarning = lambda message, *rest, **more: say(f"warning: {one_line(str(message))}")
        yield
