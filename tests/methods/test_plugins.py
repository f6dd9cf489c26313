"""Methods, benchmarks and losses from outside the package: of a file, or of an installed package."""

import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

from conftest import easy_task, tiny_backbone
from expect import expect_cli_error, expect_error
from protosteer.cli import main
from protosteer.errors import DataError, ProtosteerWarning, SettingsError
from protosteer.evaluation.sweep import plan_experiments, run_several
from protosteer.learner import Learner
from protosteer.methods import METHODS, find_method, load_plugins
from protosteer.methods.ncm import NCM
from protosteer.paper import losses
from protosteer.settings import LOSSES, Settings
from protosteer.streams import Benchmark, find_benchmark

METHOD = '''
"""Nearest class mean under another name."""
from protosteer.methods.ncm import NCM
from protosteer.methods import register_method

@register_method("mine")
class Mine(NCM):
    """As NCM."""

class Plain(NCM):
    """Without the decorator."""

number = 5
'''
STREAM = """
import torch
from protosteer.data.images import ArrayImages
from protosteer.data.labelled import Dataset, Labelled
from protosteer.streams import Benchmark

def load(reading):
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(4).repeat(6)
    pixels = (labels[:, None, None, None] * 60 + torch.randint(20, (24, 3, 8, 8), generator=draw)).to(torch.uint8)
    part = Labelled(ArrayImages(pixels), labels)
    return Dataset("greys", ["black", "dark", "light", "white"], part, part)

GREYS = Benchmark("greys", "Four greys", tasks=2, crop=1.0, load=load)
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(METHOD)
    (tmp_path / "greys.py").write_text(STREAM)
    monkeypatch.chdir(tmp_path)
    before = dict(METHODS)
    yield tmp_path
    METHODS.clear()
    METHODS.update(before)


def test_a_file_s_method_and_stream_are_run(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "greys.py:GREYS", "--method", "mine.py:Mine", "--device", "cpu", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert len(figures["seeds"][0]["matrix"]) == 2
    known = json.loads((files / "runs/greys-mine-nano/manifest.json").read_text())["configuration"]
    assert known["method"] == "mine" and known["plugin"]["file"] == "mine.py" and len(known["plugin"]["sha256"]) == 64
    assert main(["compare", "runs/greys-mine-nano"]) == 0
    METHODS.pop("mine")  # as in another process
    again = ["evaluate-run", "runs/greys-mine-nano", "--stream", "greys.py:GREYS", "--device", "cpu"]
    expect_cli_error("other-method", *again)
    expect_cli_error("other-method", *again, "--method", "mine.py:Plain")
    capsys.readouterr()
    assert main([*again, "--method", "mine.py:Mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seeds"][0]["matrix"] == figures["seeds"][0]["matrix"]
    (files / "mine.py").write_text(METHOD + "# another version\n")
    expect_cli_error("other-configuration", "run", "greys.py:GREYS", "--method", "mine.py:Mine", "--resume")


def test_several_methods_may_come_from_files(files: Path) -> None:
    plan = plan_experiments({"stream": "greys.py:GREYS", "method": "mine.py:Plain,ncm", "device": "cpu"})
    assert list(plan) == ["plain", "ncm"] and plan["plain"][0].method == "mine.py:Plain"
    outcome = run_several(plan)
    matrices = [figures["seeds"][0]["matrix"] for figures in outcome.figures.values()]
    assert matrices[0] == matrices[1]
    assert find_method("mine.py:Plain") is METHODS["plain"], "the file is imported once"


@pytest.mark.parametrize(
    ("spec", "text", "code"),
    [
        ("gone.py:Mine", None, "no-plugin-file"),
        ("mine.py:Theirs", None, "no-plugin-name"),
        ("mine.py:", None, "no-plugin-name"),
        ("mine.py", None, "no-plugin-name"),
        ("mine.py:number", None, "not-a-method"),
        ("bad.py:Mine", "import nowhere_to_be_found", "broken-plugin"),
        ("bad.py:Mine", "raise SyntaxError('x\\ny')", "broken-plugin"),
        ("bad.py:Mine", METHOD.replace('"mine"', '"cpp"'), "duplicate-method"),
    ],
)
def test_mistakes_in_a_file_are_named(files: Path, spec: str, text: str | None, code: str) -> None:
    if text is not None:
        (files / "bad.py").write_text(text)
    with expect_error(code, SettingsError):
        find_method(spec)
    with expect_error("not-a-benchmark", DataError):
        find_benchmark("mine.py:number")


@pytest.fixture
def installed(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with methods, of which one is broken and one has a taken name, and benchmarks, one broken."""
    about = files / "outside-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[protosteer.methods]\noutside = mine:Plain\nbroken = nowhere:X\nncm = mine:Plain\n\n[protosteer.streams]\ngreys = greys:GREYS\nlost = nowhere:X\n"
    )
    monkeypatch.syspath_prepend(str(files))
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k not in ("mine", "greys")})
    assert "outside" in {point.name for point in metadata.entry_points(group="protosteer.methods")}


def test_entry_points_are_found_by_name(installed: None) -> None:
    assert find_method("outside").name == "outside" and issubclass(METHODS["outside"], NCM)
    with pytest.warns(ProtosteerWarning) as warned:
        load_plugins()
    assert [w for w in ("broken", "ncm") if any(w in str(one.message) for one in warned)] == ["broken", "ncm"]
    assert METHODS["ncm"] is NCM and "broken" not in METHODS
    assert isinstance(find_benchmark("greys"), Benchmark)
    with expect_error("broken-plugin", SettingsError):
        find_benchmark("lost")
    with expect_error("unknown-stream", DataError, name="grays"):
        find_benchmark("grays")


@pytest.fixture
def own_loss() -> Iterator[list[int]]:
    calls: list[int] = []

    @losses.register_loss("own")
    def own(
        z: torch.Tensor, labels: torch.Tensor, anchors: object, settings: Settings, generator: torch.Generator
    ) -> torch.Tensor:
        assert isinstance(generator, torch.Generator)
        calls.append(0 if anchors is None else 1)
        torch.testing.assert_close(z.norm(dim=1), torch.ones(len(z)))
        return losses.supcon(z, labels, settings.temperature)

    yield calls
    del losses.REGISTERED["own"]
    LOSSES.remove("own")


def test_an_own_loss_is_a_value_of_the_setting(own_loss: list[int]) -> None:
    small = {"epochs": 2, "batch_size": 8, "neck_hidden": 16, "augmentation": "crop", "centroids": 2}
    models = []
    for name in ("own", "supcon"):
        learner = Learner(tiny_backbone(), Settings.preset("paper", loss=name, **small))
        for classes in (["ant", "bee"], ["cat", "dog"]):
            learner.learn(easy_task(classes), name=classes[0])
        models.append(learner)
    assert own_loss == [0] * 4 + [1] * 4
    one, two = (learner.memory.tasks[1].prompt for learner in models)
    assert torch.equal(one, two), "the same loss trains the same prompt"
    with expect_error("duplicate-loss", SettingsError, name="cpl"):
        losses.register_loss("cpl")(losses.supcon)


def test_a_loss_that_is_not_registered_is_unknown() -> None:
    with expect_error("unknown-choice", SettingsError, name="loss"):
        Settings(loss="own")
