"""Text that others wrote: lists on standard input, list files, class orders and settings."""

import contextlib
import functools
import io
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from targets import TARGETS, Target, try_out

from protosteer.cli.options import parse_settings
from protosteer.cli.predict import find_files
from protosteer.data.class_folders import read_lists
from protosteer.data.image_files import text_lines
from protosteer.data.image_lists import read_paths, read_table
from protosteer.data.images import ForgivingFiles
from protosteer.errors import ProtosteerError
from protosteer.settings import Settings
from set_toys import SMALL, save

pytestmark = pytest.mark.slow


def check_stdin(data: bytes) -> None:
    """Every line is a file that is read, or told to be none."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        save(Path("a.png"))
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        try:
            images = ForgivingFiles(find_files(["-"]), SMALL)
            images.pixels(range(len(images)))
        except ProtosteerError:
            pass


def check_list(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        for name in ("cat/a.png", "dog/b.png"):
            save(Path(folder, name))
        path = Path(folder, "list.txt")
        path.write_bytes(data)
        for read in (read_lists, text_lines):
            with contextlib.suppress(ProtosteerError):
                read(path)


def check_table(suffix: str, data: bytes) -> None:
    with TemporaryDirectory() as folder:
        for name in ("cat/a.png", "dog/b.png"):
            save(Path(folder, name))
        path = Path(folder, f"list.{suffix}")
        path.write_bytes(data)
        for read in (read_paths, read_table):
            try:
                read(path)
            except ProtosteerError as error:
                assert "\n" not in str(error)


def parquet_seeds() -> list[bytes]:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    found = []
    for labels in (["cat", "dog"], [0, 1]):
        whole = io.BytesIO()
        pyarrow.parquet.write_table(pa.table({"path": ["cat/a.png", "dog/b.png"], "label": labels}), whole)
        found.append(whole.getvalue())
    return found


def check_toml(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "settings.toml")
        path.write_bytes(data)
        try:
            Settings.from_toml(path)
        except ProtosteerError as error:
            assert len(str(error)) < 10_000


def check_words(data: bytes) -> None:
    with contextlib.suppress(ProtosteerError):
        Settings.from_dict(parse_settings(data.decode("utf-8", "surrogateescape").split("\n")))


TOML = "\n".join(f"{name} = {str(value).lower()!s}" for name, value in [("epochs", 5), ("prompts", True)])
SEEDS_TOML = [
    TOML.encode() + b"\ntemperature = 0.5\nloss = \"cpl\"\nseed = 0xff\nrule = 'paper'\nneck_hidden = 1_000\n",
    b'[table]\na = [1, {b = 2}]\n"quoted.name" = 1979-05-27T07:32:00Z\nx = """\nmany\n"""\ninfinite = inf\n',
]
TARGETS["stdin"] = Target(lambda: [b"a.png\n\nb.png\r\n/dev/null\n", b"caf\xe9.png\na.png", b"a.png"], check_stdin)
TARGETS["lists"] = Target(
    lambda: [b"# images\ncat/a.png cat\ndog/b.png dog\n", b"\xef\xbb\xbfcat/a.png 0\r\ndog/b.png 1\r\n"], check_list
)
TARGETS["csv"] = Target(
    lambda: [b"path,label\ncat/a.png,cat\ndog/b.png,dog\n", b'\xef\xbb\xbfn,label,path\r\n1,"c\nt",cat/a.png\r\n'],
    functools.partial(check_table, "csv"),
)
TARGETS["jsonl"] = Target(
    lambda: [b'{"path": "cat/a.png", "label": "cat"}\n{"label": 3, "path": "dog/b.png"}\n'],
    functools.partial(check_table, "jsonl"),
)
TARGETS["parquet"] = Target(parquet_seeds, functools.partial(check_table, "parquet"))
TARGETS["toml"] = Target(lambda: SEEDS_TOML, check_toml)
TARGETS["words"] = Target(
    lambda: [b"epochs=5\nloss=cpl\ntemperature=0.5", b'seed=1\nprompts=false\nrule="evidence"\nbatch_size=8'],
    check_words,
)


@pytest.mark.parametrize("name", ["stdin", "lists", "csv", "jsonl", "parquet", "toml", "words"])
def test_text(name: str) -> None:
    try_out(name, examples=80 if name == "stdin" else 150)
