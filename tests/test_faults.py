"""Every write, sync, rename, change of permissions and removal of a command fails once, or is where it is killed.

Afterwards the file is the old one or a whole new one, the same command ends as if nothing had happened, and
nothing that holds data is left beside the file.
"""

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from photo_toys import photos
from protosteer.cli import main
from protosteer.model import file as model_file
from protosteer.runtime.checkpoint import CheckpointFile

pytestmark = pytest.mark.slow

CALLS = ("write", "fsync", "chmod", "replace", "unlink")
INSTANT = ["--preset", "instant"]
TRAINED = [word for s in ("epochs=1", "batch_size=8", "neck_hidden=16", "augmentation=none") for word in ("--set", s)]


class Killed(BaseException):
    """Nothing catches it, and nothing is done after it: every further call ends in it, too."""


@contextlib.contextmanager
def fault(at: int | None, error: int | None = None) -> Iterator[list[str]]:
    """The call with that number fails with an error of the system, or kills; gives the calls that were made.

    A write that is killed has written a half.
    """
    made: list[str] = []
    dead = False

    def shim(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal dead
            if dead:
                raise Killed
            made.append(name)
            if len(made) != at:
                return real(*arguments, **more)
            if error is not None:
                raise OSError(error, os.strerror(error))
            dead = True
            if name == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise Killed

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFile.__init__, "__defaults__", (0.0,))
        for name in CALLS:
            patch.setattr(os, name, shim(name, getattr(os, name)))
        yield made


@dataclass(frozen=True)
class Case:
    """A command, the file that it changes, and one that clears up behind it, where it has nothing more to do."""

    words: list[str]
    target: Path
    then: list[str]

    def run(self) -> int:
        return main(self.words)

    def found(self) -> bytes | None:
        return self.target.read_bytes() if self.target.exists() else None

    def whole(self) -> list[bytes | None]:
        """What the file holds one after the other when nothing disturbs."""
        states, real = [self.found()], os.replace
        with pytest.MonkeyPatch.context() as patch:

            def replace(source: str, target: Path) -> None:
                real(source, target)
                if Path(target) == self.target:
                    states.append(self.found())

            patch.setattr(os, "replace", replace)
            assert self.run() == 0
        return states


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place").resolve()
    for name, classes in {"spring": ["ant", "bee"], "summer": ["cat", "dog"]}.items():
        photos(folder / name, classes, per_class=4)
        assert main(["learn", str(folder / f"{name}.protosteer"), str(folder / name), *INSTANT]) == 0
    return folder


def learn(place: Path, folder: Path) -> Case:
    path = folder / "shop.protosteer"
    path.write_bytes((place / "spring.protosteer").read_bytes())
    return Case(["learn", str(path), str(place / "summer")], path, ["forget", str(path), "ant"])


def learn_trained(place: Path, folder: Path) -> Case:
    path = folder / "shop.protosteer"
    words = ["learn", str(path), str(place / "summer"), *TRAINED, "--holdout", "0"]
    return Case(words, path, ["forget", str(path), "cat"])


def forget(place: Path, folder: Path) -> Case:
    path = folder / "shop.protosteer"
    path.write_bytes((place / "spring.protosteer").read_bytes())
    return Case(["forget", str(path), "ant"], path, ["learn", str(path), str(place / "summer")])


def merge(place: Path, folder: Path) -> Case:
    path = folder / "both.protosteer"
    models = [str(place / f"{name}.protosteer") for name in ("spring", "summer")]
    return Case(["merge", *models, "-o", str(path)], path, ["forget", str(path), "ant"])


def adapt(place: Path, folder: Path) -> Case:
    path = folder / "adapted"
    then = ["learn", str(folder / "m.protosteer"), str(place / "spring"), *INSTANT, "--adapted", str(path)]
    return Case(["adapt", str(place / "summer"), "-o", str(path), *TRAINED], path, then)


MAKERS = [learn, learn_trained, forget, merge, adapt]
Maker = Callable[[Path, Path], Case]


def beside(case: Case) -> list[str]:
    """What lies beside the file and is named after it."""
    return sorted(p.name for p in case.target.parent.iterdir() if p.name.startswith(f".{case.target.name}"))


def check_after(case: Case, states: list[bytes | None]) -> None:
    now = case.found()
    assert now in states
    if now == states[-1]:
        assert main(case.then) == 0
    else:
        assert case.run() == 0 and case.found() == states[-1]
    assert case.target.name == "adapted" or beside(case) == []


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("how", ["full", "killed"])
def test_a_fault_at_every_call_leaves_the_old_or_the_new_and_nothing_else(place, tmp_path, make: Maker, how: str):
    (tmp_path / "whole").mkdir()
    with fault(None) as calls:
        states = make(place, tmp_path / "whole").whole()
    assert len(states) >= 2 and {"write", "fsync", "chmod", "replace"} <= set(calls)
    for at in range(1, len(calls) + 1):
        folder = tmp_path / str(at)
        folder.mkdir()
        case = make(place, folder)
        if how == "full":
            with fault(at, errno.ENOSPC):
                code = case.run()
            assert code in (0, 2) and (code or case.found() == states[-1])
        else:
            with fault(at), pytest.raises(Killed):
                case.run()
        check_after(case, states)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_folder_that_cannot_be_written_to_gets_one_line(place, tmp_path, monkeypatch, capsys, make: Maker):
    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    case = make(place, tmp_path)
    before = case.found()
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    capsys.readouterr()
    assert case.run() == 2
    said = capsys.readouterr().err
    assert "Read-only file system" in said and "Traceback" not in said
    assert case.found() == before and beside(case) == []


DIES = """
import os, sys
real, calls = {name: getattr(os, name) for name in ("write", "replace")}, []

def shim(name):
    def call(*arguments, **more):
        if name == sys.argv[1]:
            os._exit(9)
        return real[name](*arguments, **more)
    return call

for name in real:
    setattr(os, name, shim(name))
from protosteer.cli import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize("call", ["write", "replace"])
def test_a_process_that_dies_leaves_what_the_next_one_removes(place, tmp_path, call: str):
    case = forget(place, tmp_path)
    before = case.found()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DIES, call, *case.words]
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 9
    assert case.found() == before and len(beside(case)) == 1
    assert case.run() == 0 and beside(case) == []
    assert model_file.read(case.target).memory.classes == ["bee"]
