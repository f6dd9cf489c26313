"""One row per image file: predictions and embeddings as text, JSON, CSV and Parquet.

A file that cannot be read has a row too: its `path`, and as `error` what is wrong with it. Parquet has the keys of
`predict --json` with fixed types. CSV has a column per list entry: label_2 and probability_2 of the second class,
embedding_0, embedding_1 and so on.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from protosteer.backbones import Backbone
from protosteer.data.hf_arrow import pyarrow
from protosteer.data.image_files import image_bytes, in_threads
from protosteer.data.image_lists import SUFFIXES
from protosteer.data.images import ForgivingFiles
from protosteer.errors import DataError
from protosteer.evidence.passes import CONFIDENT
from protosteer.learner import Learner
from protosteer.prediction import Prediction
from protosteer.util.files import growing, real
from protosteer.util.text import counted, printable, without_control
from protosteer.workflows.ood import Rejection

Row = Mapping[str, Any]
# Keys of a prediction that hold one value each.
COLUMNS = ("path", "label", "probability", "similarity", "energy", "unknown", "task", "passes")
# Columns of suggestions. `label` is not among them, so that no model learns its own guesses.
SUGGESTION_COLUMNS = ("path", "why", "guess", "probability", "other")
_EMBED_BATCH = 64  # images embedded at once, at most
_ROW_GROUP = 4096  # rows of a Parquet file held in memory at once


@dataclass(frozen=True)
class PredictionRow:
    """The prediction for one image, as every output reports it.

    Attributes:
        path: The file, as the user named it.
        label: The top-1 class.
        probability: Its calibrated probability.
        similarity: Its cosine similarity.
        energy: Low for images like those learned, high for out-of-distribution ones.
        unknown: Whether the image is rejected as unlike all classes; None if rejection was not asked for.
        task: The task that the class was first learned in.
        passes: Forward passes that the image took.
        top: The most probable classes: `label`, `probability` and `similarity` of each.
        explanation: What led to the prediction; empty unless asked for.
    """

    path: str
    label: str
    probability: float
    similarity: float
    energy: float
    unknown: bool | None
    task: str
    passes: int
    top: list[dict[str, Any]]
    explanation: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `predict --json` prints."""
        return {**{name: getattr(self, name) for name in (*COLUMNS, "top")}, **self.explanation}


def prediction_rows(
    learner: Learner,
    prediction: Prediction,
    paths: Sequence[str],
    top: int,
    rejection: Rejection | None = None,
    explain: bool = False,
) -> Iterator[PredictionRow]:
    """Yield a row per image of a prediction.

    Args:
        learner: The learner that predicted.
        prediction: Its prediction of B images.
        paths: B names.
        top: How many classes to list, the most probable first.
        rejection: Decides which images are unknown; None: `unknown` is None.
        explain: Add which prompts were tried, what won and what came second.
    """
    greatest = prediction.similarities.amax(dim=1).tolist()
    explanations = learner.reader.explain(prediction) if explain else [{}] * len(prediction)
    for i, (path, ranking) in enumerate(zip(paths, prediction.ranked(top), strict=True)):
        label, probability, similarity = ranking[0]
        yield PredictionRow(
            path,
            label,
            probability,
            similarity,
            energy=float(prediction.energy[i]),
            unknown=None if rejection is None else rejection.unknown(label, greatest[i]),
            task=prediction.tasks[i],
            passes=int(prediction.passes[i]),
            top=[{"label": name, "probability": p, "similarity": s} for name, p, s in ranking],
            explanation=explanations[i],
        )


class Kind(Protocol):
    """Kind and width of a table."""

    @property
    def kind(self) -> str:
        """The name of the kind: predictions, embeddings or suggestions."""

    @property
    def width(self) -> int:
        """Classes in `top` of a prediction, or dimensions of an embedding."""


class RowMaker(Kind, Protocol):
    """Makes the rows of one kind of table."""

    @property
    def chunk(self) -> int:
        """Images embedded at once. Sets cut at multiples of it give bit-identical rows."""

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        """Yield one row per file, in order."""


class Predictions:
    """Makes the rows of `predict`: see `PredictionRow`."""

    kind = "predictions"

    def __init__(self, learner: Learner, top: int = 3, reject: float | None = None, explain: bool = False):
        self.learner, self.top, self.explain = learner, top, explain
        self.rejection = None if reject is None else Rejection(learner, reject)
        self.width = min(top, len(learner.classes))
        self.chunk = learner.backbone.batch_size(learner.settings.embed_batch_size)

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        """Yield one row per file, in order."""
        learner, count = self.learner, 0
        images = ForgivingFiles(names, learner.backbone.preprocessing)
        for part in learner.stream(images, self.chunk):
            paths = names[count : count + len(part)]
            for row in prediction_rows(learner, part, paths, self.top, self.rejection, self.explain):
                error = images.errors.get(count)
                yield {"path": row.path, "error": error} if error else row.to_dict()
                count += 1


class Embeddings:
    """Makes the rows of `embed`: the plain embedding of each file, and the sha256 of its content."""

    kind = "embeddings"

    def __init__(self, backbone: Backbone):
        self.backbone = backbone
        self.width = backbone.width
        self.chunk = backbone.batch_size(_EMBED_BATCH)

    def rows(self, names: Sequence[str]) -> Iterator[Row]:
        """Yield one row per file, in order."""
        images = ForgivingFiles(names, self.backbone.preprocessing)
        for start in range(0, len(names), 16 * self.chunk):
            rows = range(start, min(start + 16 * self.chunk, len(names)))
            embeddings = self.backbone.embed_set(images, batch_size=self.chunk, rows=rows).numpy()  # [R, width]
            checksums = in_threads(_checksum, [names[i] for i in rows])
            for i, embedding, checksum in zip(rows, embeddings, checksums, strict=True):
                if i in images.errors:
                    yield {"path": names[i], "error": images.errors[i]}
                else:
                    yield {"path": names[i], "sha256": checksum, "embedding": embedding}


def _checksum(name: str) -> str | None:
    """Return the sha256 of a file's content; None if it cannot be opened, as its row says."""
    try:
        return hashlib.sha256(image_bytes(Path(name))).hexdigest()
    except OSError:
        return None


def as_text(row: Row, calibrated: bool) -> str:
    """Return a line for people, and a second one if the row has an explanation.

    Args:
        row: A prediction.
        calibrated: Show probabilities. Else they are nearly flat, and similarities are shown.
    """

    def score(ranked: Row) -> str:
        return _percent(ranked["probability"]) if calibrated else f"{ranked['similarity']:.3f}"

    runners_up = ", ".join(f"{ranked['label']} {score(ranked)}" for ranked in row["top"][1:])
    prefix = ""
    if row["unknown"]:
        similar = f"unknown, similarity {row['similarity']:.3f}; if known, "
        prefix = similar if calibrated else "unknown, nearest to "
    text = f"{row['path']}: {prefix}{row['label']} {score(row)}"
    text = printable(f"{text}  ({runners_up})" if runners_up else text)
    if "candidates" not in row:
        return text
    reason = _passes(row) if calibrated else _winner(row)
    if row["runner_up"] is None:
        reason += "; no other class is known"
    else:
        similar = f"{row['runner_up_similarity']:.3f}"
        share = f"{_percent(row['runner_up_probability'])}, similarity {similar}" if calibrated else similar
        reason += f"; runner-up: {row['runner_up']}, {share}"
    return f"{text}\n    {printable(reason)}"


def _passes(row: Row) -> str:
    """Return which prompts were tried, and why no more than these."""
    passes, candidates = counted(row["passes"], "forward pass"), row["candidates"]
    if candidates:
        reason = f"{passes}, prompts tried: {', '.join(candidates)}"
    elif row["passes"] > 1:
        reason = f"{passes}, with and without the shared prompt"
    elif row["probability"] >= CONFIDENT:
        reason = "confident after one forward pass, no task's prompt was needed"
    else:
        reason = "one forward pass, no further prompt to try"
    return f"{reason}; similarity {row['similarity']:.3f}"


def _winner(row: Row) -> str:
    retrieved, centroid = ", ".join(row["candidates"]), f"{row['centroid']} of {row['centroids']}"
    return f"retrieved: {retrieved}; won by centroid {centroid}, similarity {row['centroid_similarity']:.3f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def csv_columns(maker: Kind, explain: bool = False) -> list[str]:
    """Return the columns of a CSV file of this kind, without `error`."""
    if maker.kind == "embeddings":
        return ["path", "sha256", *(f"embedding_{i}" for i in range(maker.width))]
    if maker.kind == "suggestions":
        return [*SUGGESTION_COLUMNS]
    top_columns = [f"{name}_{place}" for place in range(2, maker.width + 1) for name in ("label", "probability")]
    return [*COLUMNS, *top_columns, *(["candidates", "runner_up"] if explain else [])]


def as_csv(cells: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Return one line of CSV without its end; numbers have six decimals."""
    line = io.StringIO()
    table = csv.DictWriter(line, columns, extrasaction="ignore", lineterminator="")
    table.writerow({n: f"{v:.6f}" if isinstance(v, float) else v for n, v in _flat(cells).items()})
    return line.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    cells = {name: _cell(value) for name, value in row.items() if name not in ("top", "embedding")}
    for place, ranked in enumerate(row.get("top", ())[1:], 2):
        cells |= {f"label_{place}": _cell(ranked["label"]), f"probability_{place}": ranked["probability"]}
    return cells | {f"embedding_{i}": value for i, value in enumerate(row.get("embedding", ()))}


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        value = ";".join(value)
    if isinstance(value, str):
        return without_control(value)
    return str(value).lower() if isinstance(value, bool) else value


def is_table(path: str) -> bool:
    """Return whether a path names a file of rows rather than a folder."""
    return Path(path).suffix.lower() in SUFFIXES


def write_table(path: Path, maker: Kind, rows: Iterable[Row]) -> None:
    """Write rows as they come to a Parquet, CSV or JSON Lines file, by its suffix; all of them or no file.

    Args:
        path: The file, which must not exist yet.
        maker: Kind and width of the table.
        rows: The rows; they are never all in memory.

    Raises:
        DataError: The file exists, even if it was created meanwhile.
    """
    write = {".parquet": write_parquet, ".csv": _write_csv, ".jsonl": _write_json}[path.suffix.lower()]
    if write is write_parquet:
        pyarrow()  # raises before there is a file
    with growing(real(path)) as file:
        write(file, maker, rows)
        if path.exists():
            raise DataError(f"{path} exists already; choose another file with out=", code="file-exists", path=path)


def write_parquet(file: IO[bytes], maker: Kind, rows: Iterable[Row]) -> None:
    """Write rows to an open file as Parquet."""
    pa = pyarrow()
    schema = _schema(pa, maker)
    rows = iter(rows)
    with pa.parquet.ParquetWriter(file, schema) as writer:
        while group := list(itertools.islice(rows, _ROW_GROUP)):
            texts = [{**row, "path": as_utf8(row["path"])} for row in group]
            writer.write_table(pa.Table.from_pylist(texts, schema))


def _schema(pa: Any, maker: Kind) -> Any:
    """Return the schema of a kind of table: the same for each file, even if all rows are errors."""
    text, number = pa.string(), pa.float64()
    if maker.kind == "embeddings":
        fields = {"path": text, "sha256": text, "embedding": pa.list_(pa.float32(), maker.width)}
    elif maker.kind == "suggestions":
        fields = {name: number if name == "probability" else text for name in SUGGESTION_COLUMNS}
    else:
        top = pa.list_(pa.struct({"label": text, "probability": number, "similarity": number}))
        kinds = {"unknown": pa.bool_(), "passes": pa.int32(), "path": text, "label": text, "task": text}
        fields = {**{name: kinds.get(name, number) for name in COLUMNS}, "top": top}
    return pa.schema({**fields, "error": text})


def _write_csv(file: IO[bytes], maker: Kind, rows: Iterable[Row]) -> None:
    out = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="", write_through=True)
    table = csv.DictWriter(out, [*csv_columns(maker), "error"], restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(map(_flat, rows))
    out.detach()  # or the file would be closed with it


def _write_json(file: IO[bytes], maker: Kind, rows: Iterable[Row]) -> None:
    for row in rows:
        values = {**row, "embedding": row["embedding"].tolist()} if "embedding" in row else row
        file.write(json.dumps(values).encode() + b"\n")


def as_utf8(name: str) -> str:
    """Return a file's name as text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
