"""Who computes in which precision if it is left to `auto`, and where that is written down."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conftest import easy_task, tiny_backbone
from expect import expect_cli_error, expect_error
from photo_toys import digit_photos
from protosteer.backbones import Backbone, precision
from protosteer.bench import bf16
from protosteer.cli import demo, main
from protosteer.errors import RunError
from protosteer.evaluation.experiment import Experiment, run_experiment
from protosteer.evaluation.manifest import upgraded
from protosteer.evaluation.sweep import plan_experiments
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.rules import reader_of
from protosteer.settings import Settings
from protosteer.workflows.learner_spec import LearnerSpec, model_digest
from protosteer.workflows.model_summary import describe

SMALL = {"stream": "split-digits", "tasks": 2, "train_per_class": 3, "test_per_class": 2, "device": "cpu"}
INSTANT, PAPER = (Settings.preset(name, prompts=False) for name in ("instant", "paper"))


@pytest.fixture(autouse=True)
def processor_with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(precision.VARIABLE)
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(bf16, "cpu_has_bf16", lambda: True)


def learned(backbone: Backbone, settings: Settings = INSTANT) -> Learner:
    learner = Learner(backbone, settings)
    learner.learn(easy_task(["ant", "bee"]))
    return learner


def test_the_paper_is_reproduced_in_fp32_unless_bf16_is_asked_for() -> None:
    backbone = tiny_backbone()
    assert Learner(backbone).backbone is backbone and Learner(backbone).backbone.precision == "bf16"
    paper = Learner(backbone, PAPER)
    assert paper.backbone.precision == paper.copy().backbone.precision == "fp32"
    assert Learner(backbone.in_precision("bf16"), PAPER).backbone.precision == "bf16"
    paper.settings = INSTANT
    assert paper.backbone.precision == "bf16"


def test_a_model_states_the_precision_of_its_features_and_predicts_in_any(tmp_path: Path) -> None:
    full = tiny_backbone().in_precision("fp32")
    learner = learned(full)
    learner.backbone = full.in_precision("bf16")
    learner.add_class("cat", easy_task(["cat"])[0])
    image = easy_task(["dog"])[0][:1]
    learner.correct(image, "dog")
    learner.save(tmp_path / "m.protosteer")
    model = model_file.read(tmp_path / "m.protosteer")
    assert [task.metadata.precision for task in model.memory.tasks] == [None, "bf16", "bf16"]
    assert model.backbone["precision"] == "bf16" and "precision" not in learned(full).model.backbone
    about = describe(model, reader_of(model.memory, model.settings))
    assert about["precision"] == ["bf16", "fp32"] and [task["precision"] for task in about["tasks"]][0] == "fp32"
    images, labels = easy_task(["ant", "bee", "cat"], seed=7)
    for name in ("fp32", "bf16"):
        assert Learner.of_model(model, full.in_precision(name)).predict(images).labels == labels


def test_a_preview_states_its_precision_too() -> None:
    settings, records = Settings(epochs=1, batch_size=8, neck_hidden=16, augmentation="none"), []
    learner = Learner(tiny_backbone(), settings)
    record = learner.learn(easy_task(["ant", "bee"]), on_usable=records.append)
    assert [one.metadata.precision for one in (*records, record)] == ["bf16", "bf16"]


def test_other_processes_compute_as_this_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learned(Backbone.load("nano"))
    spec = LearnerSpec.of(learner, "cpu")
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: False)
    assert spec.precision == spec.learner().backbone.precision == "bf16"


def test_what_differs_in_precision_is_not_resumed() -> None:
    one, other = (learned(tiny_backbone().in_precision(name)) for name in ("fp32", "bf16"))
    other.memory = one.memory
    assert model_digest(one) != model_digest(other)
    assert one._run_key(["ant"], 1) != other._run_key(["ant"], 1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"method": "cpp"}, "fp32"),
        ({"method": "protosteer", "preset": "paper"}, "fp32"),
        ({"method": "cpp", "precision": "bf16"}, "bf16"),
        ({"method": "protosteer", "preset": "instant"}, "bf16"),
        ({"method": "ncm"}, "bf16"),
        ({"method": "ncm", "precision": "fp32"}, "fp32"),
    ],
)
def test_runs_that_reproduce_the_paper_are_fp32(values: dict[str, Any], expected: str) -> None:
    assert Experiment.from_values(SMALL | values).load_backbone().precision == expected


def test_methods_that_are_compared_compute_alike() -> None:
    def precisions(methods: str, **more: str) -> set[str]:
        plan = plan_experiments({**SMALL, "method": methods, **more})
        return {one.precision for group in plan.values() for one in group}

    assert precisions("ncm,cpp") == {"fp32"} and precisions("ncm,ranpac") == {"auto"}
    assert precisions("ncm,cpp", precision="bf16") == {"bf16"}


def test_a_run_states_its_precision_and_is_not_resumed_in_another(tmp_path: Path) -> None:
    experiment = Experiment.from_values({**SMALL, "method": "ncm", "out": tmp_path / "run"})
    run_experiment(experiment)
    configuration = json.loads((tmp_path / "run/manifest.json").read_text())["configuration"]
    assert configuration["backbone"]["precision"] == "bf16"
    with expect_error("other-configuration", RunError, changed=["backbone.precision: bf16 -> fp32"]):
        run_experiment(Experiment.from_values({**SMALL, "method": "ncm", "out": tmp_path / "run", "precision": "fp32"}))
    del configuration["backbone"]["precision"]  # as older versions wrote it
    assert upgraded(configuration)["backbone"]["precision"] == "fp32"
    old = {"method": "ranpac", "settings": {"features": 9}}  # before it adapted to the first task
    assert upgraded(old)["settings"]["first_session"] == "none" and upgraded(old)["settings"]["features"] == 9


def test_the_demo_is_the_same_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []

    def stop(log: Console, backbone: Backbone, stream: object) -> None:
        chosen.append(backbone.precision)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_introduce", stop)
    for run in (demo.run_demo, lambda *place: demo.run_photos(*place, None, "nano", None)):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, 0, Console(file=io.StringIO()))
    assert chosen == ["fp32", "fp32"]


@pytest.mark.slow
def test_commands_take_a_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = digit_photos(tmp_path / "spring", [0, 1], count=4), str(tmp_path / "m.protosteer")
    learn = ["--backbone", "nano", "--preset", "instant", "--holdout", "0", "--json"]
    assert main(["learn", model, str(folder), *learn, "--precision", "bf16"]) == 0
    capsys.readouterr()
    assert main(["inspect", model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["precision"] == ["bf16"]
    image, answers = str(folder / "one" / "01.png"), []
    for name in ("fp32", "bf16", "auto"):
        assert main(["predict", model, image, "--json", "--precision", name]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert [answer["label"] for answer in answers] == ["one"] * 3
    assert answers[0]["probability"] != answers[1]["probability"] and answers[1] == answers[2]
    out = str(tmp_path / "shards") + "/"
    pytest.importorskip("pyarrow")
    assert main(["embed", model, image, "--out", out, "--precision", "bf16"]) == 0
    expect_cli_error("other-shards", "embed", model, image, "--out", out, "--precision", "fp32")
    expect_cli_error("usage", "predict", model, image, "--precision", "half")


def test_bf16_is_measured_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bf16.skip_reason("auto") is bf16.skip_reason("bf16") is None and bf16.skip_reason("fp32")
    monkeypatch.setattr(bf16, "cpu_has_bf16", lambda: False)
    assert "bf16" in str(bf16.skip_reason("auto")) and bf16.skip_reason("bf16") is None
