"""What the Tab key offers, asked as typer's scripts ask for it, and once by bash itself."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import tiny_backbone
from protosteer.backbones import list_backbones
from protosteer.cli import completion, main
from protosteer.data.datasets.registry import list_datasets
from protosteer.learner import Learner
from protosteer.methods import METHODS
from protosteer.methods.testing import toy_images
from protosteer.settings import PRESETS, Settings
from protosteer.streams import BENCHMARKS


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    learner = Learner(tiny_backbone(), Settings.preset("paper", prompts=False))
    images, labels = toy_images(["kettle", "teapot"], 2)
    learner.learn((images, labels), name="kitchen")
    learner.save(tmp_path / "shop.protosteer")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "shop.protosteer"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("pre", ["predict"]),
        ("--v", ["--version"]),
        ("run split-", ["split-cifar100", "split-details", "split-digits"]),
        ("run --meth", ["--method"]),
        ("run --method der", ["der++"]),
        ("run split-digits --backbone de", ["deit"]),
        ("learn --preset in", ["instant"]),
        ("learn --engine r", ["ray"]),
        ("methods dual", ["dualprompt"]),
        ("datasets get mn", ["mnist"]),
        ("datasets --data", ["--data-dir"]),
        ("inspect sho", []),  # the shell completes files where nothing is offered
        ("learn --weights sho", []),
        ("forget shop.protosteer ", ["kettle", "teapot"]),
        ("forget shop.protosteer --task k", ["kitchen"]),
        ("forget absent.protosteer k", []),
        ("correct shop.protosteer new.jpg te", ["teapot"]),
    ],
)
def test_tab_offers_names_that_fit(model, line, offered, monkeypatch, capsys):
    for name, value in {
        "_PROTOSTEER_COMPLETE": "complete_bash",
        "COMP_WORDS": f"protosteer {line}",
        "COMP_CWORD": str(len(line.split(" "))),
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    assert sorted(capsys.readouterr().out.split()) == offered


def test_names_are_those_of_the_registries():
    assert set(completion.method_names()) == {*METHODS}
    assert completion.backbone_names() == ["auto", *(row.alias for row in list_backbones())]
    assert set(completion.stream_names()) == {*BENCHMARKS, "folder:", "domains:"}
    assert set(completion.dataset_names()) == {row.info.name for row in list_datasets(None)}
    assert set(completion.preset_names()) == {*PRESETS}


def test_bash_completes_without_torch(tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    program = tmp_path / "protosteer"
    code = (
        "import sys; from protosteer.cli import main; code = main(); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c {code!r} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    script = (
        "source <(protosteer --show-completion bash); COMP_WORDS=(protosteer run --method dualp); COMP_CWORD=3; "
        '_protosteer_completion protosteer; echo "${COMPREPLY[@]}"'
    )
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run([bash, "-c", script], env={**os.environ, **path}, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["dualprompt"], "")
