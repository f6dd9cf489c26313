"""The command line: quick help, exit codes, one-line errors, figures on standard output alone."""

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import protosteer
import protosteer.cli.demo
from expect import expect_cli_error, run_cli
from protosteer.cli import main
from protosteer.cli.common import sigterm_as_ctrl_c
from protosteer.errors import DataError, ProtosteerWarning


def command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, **options)


@pytest.fixture
def demo_does(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Put something else in the place of the demo's work."""

    def put(work: Callable[[], None]) -> None:
        monkeypatch.setattr(protosteer.cli.demo, "run_demo", lambda *_, **__: work())

    return put


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize("words", ["--help", "demo --help", "datasets get --help", "--version", ""])
def test_help_does_not_wait_for_torch(words: str) -> None:
    done = command("-X", "importtime", "-m", "protosteer", *words.split())
    assert done.returncode == 0 and done.stdout.strip()
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.split("|")[-1].strip() for line in lines}
    assert "typer" in imported
    assert not imported & {"torch", "numpy", "sklearn", "matplotlib", "kornia", "requests"}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(capsys, "--version").out == f"protosteer {protosteer.__version__}\n"


@pytest.mark.parametrize("words", [["--debug", "demo"], ["demo", "--debug"]])
def test_debug_shows_the_traceback(words: list[str], demo_does: Any, capsys: pytest.CaptureFixture[str]) -> None:
    demo_does(raising(DataError("bad image x.png; remove it")))
    assert main(words) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_error_of_several_lines_is_told_in_one(demo_does: Any, capsys: pytest.CaptureFixture[str]) -> None:
    demo_does(raising(DataError("bad image:\n  x.png")))
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "error: bad image: x.png\n"


def test_a_defect_is_not_passed_off_as_a_users_mistake(demo_does: Any) -> None:
    demo_does(raising(ZeroDivisionError("a defect")))
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


def test_ctrl_c_ends_with_one_line(demo_does: Any, capsys: pytest.CaptureFixture[str]) -> None:
    demo_does(raising(KeyboardInterrupt()))
    assert main(["demo"]) == 130
    said = capsys.readouterr()
    assert said.err.startswith("interrupted") and said.err.count("\n") == 1 and said.out == ""


def test_warnings_are_one_clean_line_each(demo_does: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        for _ in range(2):
            warnings.warn("the prompt has collapsed.\nUse a larger batch", ProtosteerWarning, stacklevel=1)
        raise DataError("and then it failed")

    demo_does(work)
    before = warnings.showwarning
    assert main(["demo"]) == 2
    said = capsys.readouterr().err
    assert said == "warning: the prompt has collapsed. Use a larger batch\nerror: and then it failed\n"
    assert warnings.showwarning is before


def test_backbones_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PROTOSTEER_CACHE", str(tmp_path))
    weights = tmp_path / "weights" / "vit_base_patch16_224.dino.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"")
    weights.with_name("mine.safetensors").write_bytes(b"")
    printed = json.loads(run_cli(capsys, "backbones", "--json").out)
    rows = {row["alias"]: row for row in printed["backbones"]}
    assert {"mini", "nano", "vit-tiny", "vit-small", "dinov2-small", "vit", "deit", "dino", "mae"} == set(rows)
    assert rows["dino"]["on_disk"] and rows["dino"]["path"] == str(weights)
    assert not rows["vit"]["on_disk"] and rows["vit"]["path"] is None
    assert rows["vit"]["mean"] == [0.5, 0.5, 0.5] and rows["mae"]["pool"] == "mean"
    assert rows["nano"]["on_disk"] and 0 < rows["nano"]["parameters"] < 10_000_000
    assert printed["folder"] == str(weights.parent) and printed["others"] == ["mine"]


def test_backbones_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROTOSTEER_CACHE", str(tmp_path))
    said = run_cli(capsys, "backbones")
    line = next(line for line in said.out.splitlines() if line.split()[:1] == ["vit"])
    shown = ("vit_base_patch16_224.augreg_in21k_ft_in1k", "85.8 M", "224 px", "class token", "Apache-2.0", "no")
    assert all(part in line for part in shown)
    assert str(tmp_path / "weights") in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_threads_that_wait_sleep_soon_unless_the_user_has_said_how(given, expected):
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import os; from protosteer.cli import main; main(['--version']); print(os.environ.get('GOMP_SPINCOUNT'))"
    done = command("-c", code, env={**environment, **given})
    assert done.stdout.split()[-1] == str(expected)


def test_an_interruption_that_python_calls_another_error_is_one_all_the_same():
    """So it does, in some versions, amid the making of a class, as an import makes many."""

    class Interrupted:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        type("Made", (), {"part": Interrupted()})
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        raise RuntimeError("while a class was made") from KeyboardInterrupt()
    with pytest.raises(RuntimeError, match="another"), sigterm_as_ctrl_c():
        raise RuntimeError("another") from ValueError()


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        ("dmeo", ["'demo'", "protosteer --help"]),
        ("demo --sead 1", ["--seed", "protosteer demo --help"]),
        ("demo --out /dev/null/x", ["/dev/null/x", "--out"]),
    ],
)
def test_a_mistake_names_what_was_meant_and_the_help(words: str, hints: list[str]) -> None:
    said = expect_cli_error("cannot-write" if "--out" in words else "usage", *words.split())
    assert all(hint in said for hint in hints) and said.count("\n") == 1


def test_help_lists_commands_in_the_order_of_use(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(r"^│ ([a-z]+) ", run_cli(capsys, "--help").out, flags=re.MULTILINE)
    wanted = ["learn", "predict", "correct", "suggest", "forget", "serve", "demo", "run", "methods"]
    assert [name for name in shown if name in wanted] == wanted
