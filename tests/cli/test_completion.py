"""Completion in the shells themselves; those that are not installed are left out."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protosteer.backbones import list_backbones
from protosteer.bench.report import SUBJECTS
from protosteer.cli import completion, main
from protosteer.data.datasets.registry import list_datasets
from protosteer.methods import METHODS
from protosteer.settings import PRESETS
from protosteer.streams import BENCHMARKS

# What stands on the line, and some of what Tab offers at its end; the last word is what has been typed of it.
OFFERED = [
    (["pre"], ["predict"]),
    (["data"], ["datasets"]),
    (["--v"], ["--version"]),
    (["completion", ""], ["bash", "zsh", "fish"]),
    (["run", "split-"], ["split-cifar100", "split-digits", "split-details"]),
    (["run", "--meth"], ["--method"]),
    (["run", "--method", "der"], ["der++"]),
    (["run", "split-digits", "--backbone", "de"], ["deit"]),
    (["learn", "--preset", "in"], ["instant"]),
    (["learn", "--engine", "r"], ["ray"]),
    (["learn", "--weights", "sho"], ["shop 1.protosteer"]),
    (["methods", "dual"], ["dualprompt"]),
    (["datasets", "get", "mn"], ["mnist"]),
    (["datasets", "--data"], ["--data-dir"]),
    (["inspect", "sho"], ["shop 1.protosteer"]),
    (["serve", "birds.protosteer", "sho"], ["shop 1.protosteer"]),
    (["--debug", "forget", "shop 1.protosteer", "--back"], ["--backup"]),
    (["learn", "--threads", ""], []),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("completion")
    (place / "shop 1.protosteer").touch()
    for shell in completion.SHELLS:
        (place / f"script.{shell}").write_text(script(shell))
    return place


def script(shell: str) -> str:
    return completion.SHELLS[shell](completion.commands()) + "\n"


def run(shell: str, code: str, folder: Path, *words: str) -> list[str]:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [program, "-c", code, *words], cwd=folder, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("line", "offered"), OFFERED, ids=lambda value: " ".join(value))
def test_bash_offers_what_fits(folder, line, offered):
    code = 'source script.bash; COMP_WORDS=(protosteer "$@"); COMP_CWORD=$#; _protosteer; printf "%s\\n" "${COMPREPLY[@]}"'
    assert [word for word in run("bash", code, folder, "bash", *line) if word] == offered


def test_bash_takes_a_flag_and_its_value_as_one_word(folder):
    code = 'source script.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _protosteer; echo ${COMPREPLY[@]}'
    assert run("bash", code, folder, "bash", "protosteer", "run", "--preset", "=", "be") == ["best"]
    (all_of_them,) = run("bash", code, folder, "bash", "protosteer", "run", "--preset", "=")
    assert sorted(all_of_them.split()) == sorted(PRESETS)


def test_fish_offers_what_fits(folder):
    lines = [" ".join(word.replace(" ", "\\ ") for word in ["protosteer", *line]) for line, _ in OFFERED]
    code = "source script.fish; for line in $argv; complete -C $line; echo end; end"
    found = iter(run("fish", code, folder, *lines))
    for line, offered in OFFERED:
        words = [one.split("\t")[0].replace("\\ ", " ") for one in iter(found.__next__, "end")]
        assert sorted(words) == sorted(offered), line


def test_zsh_completes_at_the_press_of_tab(folder):
    program = shutil.which("zsh")
    if program is None:
        pytest.skip("zsh is not installed")
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execve(program, [program, "-f"], {"TERM": "dumb", "PATH": os.environ["PATH"], "HOME": str(folder)})
    try:
        shown = 'protosteer() { print -r -- "got: $@." }'  # what is run in place of the command
        setup = f"autoload -U compinit; compinit -u -D; source script.zsh; {shown}; print rea''dy\n"
        os.write(terminal, setup.encode())
        assert "ready\r\n" in read_until(terminal, "ready\r\n")
        for typed, becomes in (
            ("insp", "inspect"),
            ("run --method der", "run --method der++"),
            ("run --preset=inst", "run --preset=instant"),
            ("run --overw", "run --overwrite"),
            ("datasets get notm", "datasets get notmnist"),
            ("inspect sho", "inspect shop 1.protosteer"),
        ):
            os.write(terminal, f"protosteer {typed}\t\n".encode())
            assert f"got: {becomes}." in read_until(terminal, f"got: {becomes}.")
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def read_until(terminal: int, words: str, seconds: float = 20.0) -> str:
    """What the terminal shows, until the words are there or time is up."""
    shown, until = "", time.monotonic() + seconds
    while words not in shown and time.monotonic() < until:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
    return shown


def test_names_are_those_that_there_are():
    assert set(METHODS) == {*completion.METHODS}  # others may have asked for one of them before
    assert list(BENCHMARKS) == completion.STREAMS
    assert [row.alias for row in list_backbones()] == completion.BACKBONES
    assert [row.info.name for row in list_datasets(None)] == completion.DATASETS
    assert list(SUBJECTS) == completion.SUBJECTS


def test_the_script_is_made_without_torch():
    code = (
        "import json, sys; from protosteer.cli import main; codes = [main(['completion', s]) for s in ('bash', 'zsh')]; "
        "print(json.dumps([codes, 'torch' in sys.modules]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stderr) == [[0, 0], False]


def test_another_shell_is_refused_in_one_line(capsys):
    assert main(["completion", "tcsh"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'tcsh' is not known; choose one of bash, zsh, fish" in line
