"""Shards: the same rows as in one piece, each made once, also where a call was stopped."""

from pathlib import Path

import pytest

from expect import expect_error
from photo_toys import EVIDENCE, photos, taught
from protosteer.errors import DataError, SettingsError
from protosteer.runtime.executor import LocalExecutor
from protosteer.workflows.prediction_table import Embeddings, Predictions
from protosteer.workflows.sharded_predict import write_shards

pytest.importorskip("pyarrow", reason="shards need pyarrow")


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Predictions:
    folder = photos(tmp_path_factory.mktemp("taught") / "spring", ["ant", "bee", "cat"])
    made = Predictions(taught(folder, settings=EVIDENCE))
    made.chunk = 4
    return made


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    folder = photos(tmp_path / "new", ["ant", "bee", "cat"], 6, seed=3)
    (folder / "bee" / "02.png").write_bytes(b"no image")
    return [str(path) for path in sorted(folder.rglob("*.png"))]


def write(maker, names, out, size=4, about=()):
    return write_shards(LocalExecutor(), maker, lambda: pytest.fail("it is here"), about, names, str(out), size)


def rows(folder: Path) -> list[dict]:
    import pyarrow.parquet

    parts = [pyarrow.parquet.read_table(path) for path in sorted(folder.glob("part-*.parquet"))]
    return [row for part in parts for row in part.to_pylist()]


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}


def test_shards_have_the_rows_of_one_piece(maker, names, tmp_path):
    outcome = write(maker, list(reversed(names)), tmp_path / "out", size=3)  # no chunk of four is cut
    assert (outcome.written, outcome.complete, outcome.unreadable) == (5, 0, 1)
    whole = [{"error": None, **row} for row in maker.rows(names)]
    assert [{k: v for k, v in row.items() if v is not None} for row in rows(tmp_path / "out")] == [
        {k: v for k, v in row.items() if v is not None} for row in whole
    ]


def test_what_is_there_is_not_made_again(maker, names, tmp_path):
    out = tmp_path / "out"
    write(maker, names, out)
    before = files(out)
    lost = sorted(before)[2]
    (out / lost).unlink()
    (out / f".{lost}.dead.tmp").write_bytes(b"of a process that was killed")
    outcome = write(maker, names, out)
    assert (outcome.written, outcome.complete) == (1, 4)
    after = files(out)
    assert {n: d for n, (_, d) in after.items()} == {n: d for n, (_, d) in before.items()}
    assert all(after[name] == before[name] for name in before if name != lost)


def test_a_call_that_fails_keeps_what_was_done(maker, names, tmp_path, monkeypatch):
    out, known = tmp_path / "out", maker.rows

    def failing(some):
        if names[8] in some:
            raise DataError("stopped", code="stopped")
        return known(some)

    monkeypatch.setattr(maker, "rows", failing)
    with expect_error("stopped", DataError):
        write(maker, names, out)
    assert len(files(out)) == 2
    monkeypatch.undo()
    assert write(maker, names, out).complete == 2
    assert [row["path"] for row in rows(out)] == names


@pytest.mark.parametrize("change", ["file", "more files", "model", "options"])
def test_shards_of_something_else_are_refused(maker, names, tmp_path, change):
    out = tmp_path / "out"
    write(maker, names, out)
    before = files(out)
    if change == "file":
        Path(names[0]).write_bytes(Path(names[1]).read_bytes() + b" ")
    given = [*names, names[0]] if change == "more files" else names
    about = ("other",) if change == "model" else ()
    other = Predictions(maker.learner, top=1) if change == "options" else maker
    with expect_error("other-shards", DataError, path=str(out)):
        write(other, given, out, about=about)
    assert files(out) == before


def test_a_uri_is_a_place_too(maker, names, tmp_path):
    embeddings = Embeddings(maker.learner.backbone)
    out = tmp_path / "out"
    outcome = write(embeddings, names, f"file://{out}")
    assert outcome.written and write(embeddings, names, f"file://{out}").written == 0
    assert [row["path"] for row in rows(out)] == names
    assert all(path.name.startswith("part-") for path in out.iterdir())
    with expect_error("bad-uri", SettingsError):
        write(embeddings, names, "nonsense://somewhere")


def test_a_place_that_cannot_be_written_to(maker, names, tmp_path):
    (tmp_path / "file").write_text("mine")
    with expect_error("not-a-folder", SettingsError):
        write(maker, names, tmp_path / "file")
    with expect_error("cannot-write"):
        write(maker, names, tmp_path / "file" / "below")
