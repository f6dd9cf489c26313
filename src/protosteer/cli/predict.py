"""`protosteer predict` and `embed`: one line or row per image file."""

from __future__ import annotations

import functools
import glob
import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from protosteer.cli.common import CommandLineError, command, progress, say, sigterm_as_ctrl_c
from protosteer.cli.loading import PANEL, make_executor, open_learner, prepare, refuse_existing, say_notes
from protosteer.cli.options import (
    Device,
    Loading,
    ModelFile,
    Precision,
    Threads,
    Weights,
    Workers,
    check_reject,
    path_of,
)
from protosteer.errors import DataError
from protosteer.util.files import writing
from protosteer.util.text import counted, listed, printable

if TYPE_CHECKING:
    from protosteer.learner import Learner
    from protosteer.runtime import executor
    from protosteer.workflows.prediction_table import Predictions, RowMaker

Paths = Annotated[
    list[str],
    Argument(
        metavar="PATH",
        help="Image files, folders, patterns such as 'new/*.jpg', lists (.csv, .parquet, .jsonl) with a path column, saved Hugging Face datasets, or - to read paths from standard input.",
    ),
]
OUT_HELP = "Output file (.parquet, .csv, .jsonl), or a folder (also s3://...) for one Parquet file per shard; existing shards are skipped."
MAX_NAMED_FILES = 3  # in a line
Shard = Annotated[int, Option(min=1, help="Approximate number of images per shard.")]


@command(PANEL)
def predict(
    model: ModelFile,
    paths: Paths,
    top: Annotated[int, Option(min=1, help="Number of classes to show per image.")] = 3,
    reject: Annotated[
        float | None,
        Option(
            metavar="FRACTION",
            callback=check_reject,
            help="Label images that match no class as unknown. FRACTION: share of known images that may be rejected by mistake, such as 0.05. Look-alikes of a known class still pass.",
        ),
    ] = None,
    explain: Annotated[
        bool, Option("--explain", help="Show which prompts were tried, which class won and which came second.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per line.")] = False,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV.")] = False,
    per_second: Annotated[
        float, Option(metavar="FRAMES", min=0.001, max=100.0, help="Frames per second of video to classify.")
    ] = 1.0,
    out: Annotated[str | None, Option(metavar="FILE|FOLDER", help=OUT_HELP)] = None,
    *,
    workers: Workers,
    shard: Shard = 1024,
    loading: Loading,
) -> None:
    """Classify images. Unreadable files are reported and skipped.

    For a video, the output lists what it shows from when to when.
    """
    from protosteer.workflows.learner_spec import LearnerSpec, model_digest
    from protosteer.workflows.prediction_table import Predictions
    from protosteer.workflows.sharded_predict import predictions_from_spec

    if as_json + as_csv + (out is not None) > 1:
        raise CommandLineError("choose one of --json, --csv and --out", code="conflicting-options")
    if out is None and workers != Workers():
        raise CommandLineError("workers write into a folder; name it with --out", code="engine-without-out")
    if out is not None and explain:
        message = "--explain is not for tables; leave out --explain or --out"
        raise CommandLineError(message, code="conflicting-options")
    if videos := named_videos(paths):
        if out is not None or explain or reject is not None or len(videos) < len(paths):
            message = "videos are predicted by themselves, with --json or --csv alone"
            raise CommandLineError(message, code="conflicting-options")
        _print_segments(open_learner(model, loading), videos, per_second, as_json, as_csv)
        return
    files = find_files(paths)
    if out is None:
        learner = open_learner(model, loading)
        _say_rejection(learner, reject)
        _print_predictions(Predictions(learner, top, reject, explain), files, as_json, as_csv)
        return
    _check_out(out, workers.engine)
    executor = make_executor(workers, loading.device)
    learner = open_learner(model, loading)
    _say_rejection(learner, reject)
    make_remote = functools.partial(predictions_from_spec, LearnerSpec.of(learner, loading.device), top, reject)
    about = (model_digest(learner), top, reject)
    _write_rows(Predictions(learner, top, reject), make_remote, about, files, out, shard, executor)


def named_videos(words: Sequence[str]) -> list[Path]:
    """Return the words that are video files."""
    from protosteer.data.image_files import VIDEO_SUFFIXES

    paths = [Path(word) for word in words]
    return [path for path in paths if path.suffix.lower() in VIDEO_SUFFIXES and path.is_file()]


def _print_segments(learner: Learner, videos: Sequence[Path], per_second: float, as_json: bool, as_csv: bool) -> None:
    """Print a line per segment of each video."""
    from protosteer.workflows.prediction_table import as_csv as csv_line
    from protosteer.workflows.video_segments import predict_video

    columns = ("path", "start", "end", "label", "probability", "frames")
    if as_csv:
        print(",".join(columns))
    for path in videos:
        with progress() as on_stage:
            segments = predict_video(learner, path, per_second, on_stage)
        for segment in segments:
            row = {"path": str(path), **vars(segment)}
            share = f"{100 * segment.probability:.0f} %  ({counted(segment.frames, 'frame')})"
            words = f"{path}: {clock_time(segment.start)} to {clock_time(segment.end)}  {segment.label} {share}"
            print(json.dumps(row) if as_json else csv_line(row, columns) if as_csv else printable(words), flush=True)


def clock_time(seconds: float) -> str:
    """Format seconds as minutes and seconds, such as 1:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _say_rejection(learner: Learner, reject: float | None) -> None:
    """Say how many known images will be called unknown."""
    from protosteer.workflows.ood import rejected_share, threshold

    if not reject:
        return
    limit, (low, high) = threshold(learner, reject), rejected_share(learner, reject)
    if limit == -math.inf:
        say(f"note: too few images were learned for --reject {reject:g}; no image will be called unknown")
    else:
        say(f"note: of known images, {100 * reject:g} % will be called unknown ({low:.0f} to {high:.0f} %)")


def _print_predictions(maker: Predictions, files: list[Path], as_json: bool, as_csv: bool) -> None:
    from protosteer.workflows.prediction_table import as_csv as csv_line
    from protosteer.workflows.prediction_table import as_text, csv_columns

    learner, columns = maker.learner, csv_columns(maker, maker.explain)
    as_line = functools.partial(as_text, calibrated=learner.reader.calibrated_probabilities)
    write = json.dumps if as_json else functools.partial(csv_line, columns=columns) if as_csv else as_line
    if as_csv:
        print(",".join(columns))
    elif not as_json:
        say_notes(learner)
    failures = 0
    with sigterm_as_ctrl_c():
        for row in maker.rows([str(path) for path in files]):
            if "error" in row:
                say(f"warning: {row['error']}")
                failures += 1
            else:
                print(write(row), flush=True)
    if failures:
        outcome = "the others were predicted" if failures < len(files) else "nothing was predicted"
        message = f"{failures} of {counted(len(files), 'file')} could not be read; {outcome}"
        raise DataError(message, code="unreadable-files", count=failures)


@command(PANEL)
def embed(
    model: Annotated[str, Argument(metavar="MODEL", help="Model file, or name of a backbone such as mini.")],
    paths: Paths,
    out: Annotated[str, Option(metavar="FILE|FOLDER", help=OUT_HELP)],
    layers: Annotated[
        Literal["last", "several"],
        Option(help="Embed by the last layer, or by all that the default classifier reads, side by side."),
    ] = "last",
    *,
    workers: Workers,
    shard: Shard = 1024,
    weights: Weights = None,
    device: Device = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
) -> None:
    """Write the backbone's embedding of each image, without a prompt, and the sha256 of its file."""
    from protosteer.workflows.learner_spec import LearnerSpec
    from protosteer.workflows.prediction_table import Embeddings
    from protosteer.workflows.sharded_predict import embeddings_from_spec

    files = find_files(paths)
    _check_out(out, workers.engine)
    executor = make_executor(workers, device)
    learner = _embedder(model, Loading(None, weights, device, precision, threads))
    backbone = learner.backbone.reading(layers)
    make_remote = functools.partial(embeddings_from_spec, LearnerSpec.of(learner, device), layers)
    about = (backbone.fingerprint, backbone.preprocessing, backbone.precision)
    _write_rows(Embeddings(backbone), make_remote, about, files, out, shard, executor)


def _embedder(model: str, loading: Loading) -> Learner:
    """Return a learner without classes, with a model's backbone or the named one."""
    from protosteer.backbones import Backbone
    from protosteer.learner import Learner

    place = path_of(model)
    if place.exists() or place.suffix == ".protosteer":
        return Learner(open_learner(place, loading).backbone)
    return Learner(Backbone.load(model, loading.weights, device=prepare(loading), precision=loading.precision))


def _check_out(out: str, engine: str) -> None:
    """Reject an --out that cannot be written, before any work is done for it."""
    from protosteer.data.image_files import is_image
    from protosteer.data.image_lists import SUFFIXES
    from protosteer.workflows.prediction_table import is_table

    if is_table(out):
        if engine != "local":
            message = f"--out {out} is one file; with --engine {engine} name a folder, for one file per shard"
            raise CommandLineError(message, code="one-file-with-engine", path=out)
        if "://" in out:
            message = f"--out {out} is one file elsewhere; name a folder there, for one file per shard"
            raise CommandLineError(message, code="one-file-elsewhere", path=out)
        refuse_existing(Path(out))
    elif Path(out).is_dir() and any(is_image(entry) for entry in Path(out).iterdir()):
        message = f"--out {out} is a folder of images; name another folder, or a file such as predictions.csv"
        raise CommandLineError(message, code="out-among-images", path=out)
    elif Path(out).suffix and not ("://" in out or out.endswith("/") or Path(out).is_dir()):
        message = f"--out {out} is neither a folder nor a file that ends in {', '.join(SUFFIXES)}"
        raise CommandLineError(message, code="bad-suffix", path=out)


def _write_rows(
    maker: RowMaker,
    make_remote: Callable[[], RowMaker],
    about: Sequence[Any],
    files: Sequence[Path],
    out: str,
    shard: int,
    engine: executor.Executor,
) -> None:
    """Write the rows of all files into one file, or into a folder with a file per shard."""
    from protosteer.runtime.progress import Stage
    from protosteer.workflows.prediction_table import is_table, write_table
    from protosteer.workflows.sharded_predict import write_shards

    names = [str(path) for path in files]
    with progress() as on_stage:

        def on_progress(number: int, of: int) -> None:
            on_stage(Stage("", maker.kind, number, of))

        if is_table(out):
            failures = 0

            def rows() -> Iterator[Any]:
                nonlocal failures
                for number, row in enumerate(maker.rows(names), 1):
                    failures += "error" in row
                    yield row
                    on_progress(number, len(names))

            with writing(Path(out), "--out"):
                write_table(Path(out), maker, rows())
            shard_counts = ""
        else:
            try:
                counts = write_shards(engine, maker, make_remote, about, names, out, shard, on_progress)
            except KeyboardInterrupt:
                say(f"stopped; {out} keeps the shards that are done, and the same command resumes")
                raise
            failures, shard_counts = counts.unreadable, f", {counted(counts.written, 'shard')} made"
            shard_counts += f", {counts.complete} there already" if counts.complete else ""
    if failures:
        say(f"warning: {counted(failures, 'file')} could not be read; the column error says why")
    say(f"Written: {out}: {counted(len(names), 'row')}{shard_counts}")


def find_files(words: list[str]) -> list[Path]:
    """Return the image files that words name, in their order; listed files need not exist."""
    from protosteer.data.hf_arrow import is_set
    from protosteer.data.image_files import VIDEO_SUFFIXES, image_exists, skipped_files
    from protosteer.data.sources import image_paths

    files: list[Path] = []
    skipped_paths: dict[str, list[Path]] = {}
    for word in words:
        path_of(word)
        if word == "-":
            files += [Path(line) for line in _read_lines()]
            continue
        matches = [word] if Path(word).exists() or image_exists(Path(word)) else sorted(glob.glob(word, recursive=True))
        if not matches:
            kind = "matches no file" if glob.has_magic(word) else "does not exist"
            raise DataError(f"{word} {kind}; check the path", code="no-such-file", path=word)
        for match in map(Path, matches):
            if match.suffix.lower() in VIDEO_SUFFIXES and match.is_file():
                skipped_paths.setdefault("video", []).append(match)
                continue
            files += image_paths(match)
            if match.is_dir() and not is_set(match):
                for kind, paths in skipped_files(match).items():
                    skipped_paths.setdefault(kind, []).extend(paths)
    for kind, paths in skipped_paths.items():
        names = listed([str(path) for path in paths], MAX_NAMED_FILES)
        say(f"skipped {counted(len(paths), 'file')} ({kind}): {names}")
    if not files:
        message = "no image file was named; give files, folders, patterns or a list on standard input"
        raise DataError(message, code="no-images")
    return files


def _read_lines() -> Iterator[str]:
    """Yield lines of standard input; a file's name need not be text."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\r\n")
