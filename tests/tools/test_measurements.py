"""Tools that measure: one tiny measurement each, from end to end, and the seeds that settle it."""

import json

import pytest
import torch

import contact_sheet
import mini_scores
import suggestions
import unknowns
from conftest import tiny_backbone
from protosteer.backbones import Backbone
from protosteer.data.augment import Augmentation
from protosteer.errors import SettingsError
from protosteer.methods.cpp import CPP
from protosteer.settings import Settings
from set_toys import idx_folder
from suggestion_report import labels_needed

pytestmark = pytest.mark.slow


def test_the_contact_sheet_is_settled_by_a_seed_and_captioned():
    originals = contact_sheet.originals()
    assert len({name for name, _ in originals}) == len({image.tobytes() for _, image in originals}) == 8
    pages = [contact_sheet.sheet(originals[3:5], versions=3).tobytes() for _ in range(2)]
    assert pages[0] == pages[1]
    torch.manual_seed(0)
    drawn = Augmentation(contact_sheet.LEVELS).draw((300, 3, 20, 20))
    captions = [contact_sheet.step_names(drawn, row) for row in range(300)]
    flags = (drawn.mirrored, drawn.jittered, drawn.grey, drawn.blurred, drawn.solarized)
    for word, happened in zip(("flip", "jitter", "grey", "blur", "solarize"), flags, strict=True):
        assert [word in caption for caption in captions] == happened.tolist(), word


def colours() -> tuple[mini_scores.Part, mini_scores.Part]:
    """Four classes of twelve images, each class of its own colour, with some noise."""
    labels = torch.arange(4).repeat(12)
    base = torch.tensor([[220, 20, 20], [20, 220, 20], [20, 20, 220], [200, 200, 20]])[labels]
    noise = torch.randint(0, 30, (48, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    part = (base[:, :, None, None] + noise).byte(), labels
    return part, part


def test_scores_of_mini_are_those_of_the_papers_diagnosis(monkeypatch):
    trained = Settings.preset("best", epochs=1, batch_size=8, neck_hidden=8, centroids=2)
    monkeypatch.setitem(mini_scores.WAYS, "best", (mini_scores.Protosteer, trained))
    drawing = mini_scores.Drawing(colours, learned=6, tested=4, tasks=2, classes=4)
    backbone, stream = tiny_backbone(), drawing.stream("colours", 0)
    assert [task.classes for task in stream] == [["0", "1"], ["2", "3"]]
    assert stream[1].test.pixels(range(4)).float().mean(dim=(2, 3)).argmax(dim=1).tolist() == [2] * 4
    found = mini_scores.score(backbone, stream, ["class means", "best"])
    run = mini_scores.run_stream(CPP(backbone, trained.replace(rule="paper")), stream)
    for kind in ("true_task_with_prompt", "true_task_without_prompt"):
        assert found[kind] == pytest.approx(run.diagnosis["mean"][kind])


def test_suggestions(tmp_path, monkeypatch, capsys) -> None:
    curve = [50.0, 60.0, 60.0, 80.0]
    assert [labels_needed(curve, goal, 50) for goal in (55.0, 60.0, 70.0, 81.0)] == [25.0, 50.0, 125.0, None]
    monkeypatch.setattr(Backbone, "load", lambda *args, **kwargs: tiny_backbone())
    data, out = idx_folder(tmp_path / "digits", 4), tmp_path / "tiny.json"
    sizes = {"classes": 3, "start": 2, "images": 10, "test": 5, "count": 3, "rounds": 2, "seeds": 2}
    words = [f"--{name}={value}" for name, value in sizes.items()]

    def call(*words: str) -> str:
        given = suggestions.parser().parse_args(words)
        given.work(given)
        return capsys.readouterr().out

    call("measure", str(data), *words, f"--keep={tmp_path / 'kept.safetensors'}", f"--out={out}")
    figures = json.loads(out.read_text())
    assert {name: [len(c) for c in curves] for name, curves in figures["curves"].items()} == {
        "suggested": [3, 3], "most in doubt": [3, 3], "random": [3, 3],
    }  # fmt: skip
    assert figures["curves"]["suggested"][0][0] == figures["curves"]["random"][0][0]
    assert str(tmp_path) not in out.read_text()  # results go into the repository, paths of a machine do not
    assert "| suggested less random | +0.0 ± 0.0 |" in call("table", str(out))
    call("plot", str(out), f"--out={tmp_path / 'x.png'}")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_unknowns(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Backbone, "load", lambda *args, **kwargs: tiny_backbone())
    data = idx_folder(tmp_path / "digits", 6)
    strange = idx_folder(tmp_path / "letters", 2, seed=7, splits=("t10k",))
    sizes = {"tasks": 2, "classes-per-task": 2, "train": 10, "known": 4, "unseen": 3, "holdout": 0.2}
    options = [*(f"--{name}={value}" for name, value in sizes.items()), "--set=prompts=false", "--set=centroids=1"]
    model, out = tmp_path / "tiny.protosteer", tmp_path / "a.json"
    words = ["measure", str(data), f"--unknown={strange}", *options, f"--model={model}"]
    unknowns.main([*words, f"--out={out}"])
    result = json.loads(out.read_text())
    assert result["data"]["tasks"] == {"task-1": ["0", "1"], "task-2": ["2", "3"]}
    assert result["data"]["unknown_images"] == {"other classes": 6, "letters": 6}
    assert max(choice["unknown_rejected"]["letters"] for choice in result["rejection"]) > 50
    assert result["accuracy"] == 100.0 and result["auroc"]["letters"]["similarity"] > 0.95
    last = result["rejected_by_task"]["after"][-1]
    for choice in result["rejection"]:
        shares = last[f"{choice['reject']:g}"]
        assert choice["known_rejected"] == pytest.approx(sum(shares.values()) / 2, abs=0.01)
    capsys.readouterr()
    unknowns.main(["table", str(out)])
    assert "| a | letters | " in capsys.readouterr().out
    monkeypatch.setattr(unknowns, "learn_folder", None)  # a saved model is not learned a second time
    unknowns.main([*words, f"--out={tmp_path / 'b.json'}"])
    assert out.read_text() == (tmp_path / "b.json").read_text()
    with pytest.raises(SettingsError):
        unknowns.begin(model, tiny_backbone(), Settings.preset("paper", seed=1), {})


def test_areas_in_closed_form():
    # Three classes. Known images match one class; unknown ones are a little like all.
    known = torch.tensor([[0.9, -0.5, -0.5], [-0.5, 0.8, -0.5]])
    unknown = torch.tensor([[0.5, 0.5, 0.5], [0.85, 0.4, 0.4]])
    area = unknowns.areas(known, unknown, 0.6)
    assert (area["similarity"], area["probability"]) == (0.75, 1.0)  # 0.85 lies between the known images
    assert area["energy"]["1"] == 0.0 and area["energy"]["0.02"] == 0.75
