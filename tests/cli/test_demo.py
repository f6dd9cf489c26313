"""The demo: its five variants, its files and its words, on a small stream; and once as users run it."""

import io
import json
import subprocess
import sys
from html import escape
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

from conftest import easy_task, tiny_backbone
from expect import expect_error, run_cli
from protosteer.cli import demo
from protosteer.cli.demo import DEMO, VARIANTS, Outcome, run_demo, sentence, show, tell_files
from protosteer.data.images import ArrayImages
from protosteer.learner import Learner
from protosteer.report import plots
from protosteer.streams import Stream, Task, split_digits

pytestmark = pytest.mark.slow

QUICK = DEMO.replace(epochs=2, batch_size=8, neck_hidden=16, centroids=2, augmentation="crop")
FIGURES = {
    "last_accuracy", "anytime_accuracy",
    "avg_accuracy", "last_forgetting", "avg_forgetting", "prompts_per_image",
    "retrieval_accuracy", "bytes_per_task", "bytes_per_class", "train_seconds", "eval_seconds",
    "forward_passes", "naive_forward_passes", "trained_parameters", "matrix", "diagnosis",
    "last_image_accuracy", "avg_image_accuracy", "diagnosis_forward_passes",
    "clipped_forgetting", "backward_transfer", "forward_transfer", "task_incremental_accuracy",
    "overall_prompts_per_image", "passes_per_image", "overall_passes_per_image", "calibration_error", "reliability",
}  # fmt: skip
CPP_FIGURES = {"appendix_bytes_per_class", "prompt_bytes_per_task"}  # the paper's two ways to count memory
ABOUT = {"variants", "seed", "stream", "backbone", "settings", "versions", "seconds"}
PICTURES = ["matrix.png", "curve.png", "reliability.png", "tsne.png"]
FILES = ["digits.protosteer", *PICTURES, "figures.json"]
TIMES = ("train_seconds", "eval_seconds")


def small_stream() -> Stream:
    tasks = []
    for classes in (["ant", "bee"], ["cat", "[d]og"]):
        train, train_labels = easy_task(classes)
        test, test_labels = easy_task(classes, per_class=6, seed=99)
        tasks.append(Task(classes[0], classes, ArrayImages(train), train_labels, ArrayImages(test), test_labels))
    return Stream("small", tasks)


def small_demo(out: Path, seed: int = 0) -> Outcome:
    return run_demo(out, seed, Console(file=io.StringIO()), tiny_backbone(), small_stream(), QUICK)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return small_demo(tmp_path_factory.mktemp("demo") / "new" / "folder")


@pytest.fixture
def no_tsne(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save its time where nobody looks at the picture."""
    empty = plots.accuracy_curves({"nothing": [[0.0]]})
    monkeypatch.setattr(plots, "tsne_before_after", lambda *_: empty)


def check_files(out: Path) -> None:
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    for name in PICTURES:
        with Image.open(out / name) as image:
            image.load()
            assert image.format == "PNG"
            assert 600 <= image.width <= 1600 and 350 <= image.height <= 1000


def test_all_figures_of_all_variants(outcome: Outcome) -> None:
    assert set(outcome.figures) == ABOUT
    assert list(outcome.figures["variants"]) == ["baseline", "multi-centroid", "prompts", "cpp", "protosteer"]
    for variant in outcome.figures["variants"].values():
        assert set(variant) - CPP_FIGURES == FIGURES
        assert [len(row) for row in variant["matrix"]] == [1, 2]
    assert set(outcome.figures["backbone"]) == {"name", "fingerprint"}
    assert set(outcome.figures["versions"]) == {"python", "torch", "protosteer"}
    assert outcome.figures["seconds"] > 0


def test_variants_are_what_their_names_say(outcome: Outcome) -> None:
    variants = outcome.figures["variants"]
    assert [bool(v["trained_parameters"]) for v in variants.values()] == [False, False, True, True, True]
    assert [v["passes_per_image"] > 1 for v in variants.values()][:4] == [False, False, True, True]
    assert [v["retrieval_accuracy"] is None for v in variants.values()] == [False] * 4 + [True]
    assert ["fine_wrong" in v["diagnosis"] for v in variants.values()] == [False] * 4 + [True]
    assert 0 < variants["protosteer"]["trained_parameters"] < variants["cpp"]["trained_parameters"]
    assert variants["protosteer"]["passes_per_image"] == 1
    size = {name: v["bytes_per_class"] for name, v in variants.items()}
    assert size["baseline"] < size["multi-centroid"] < size["cpp"] and size["prompts"] < size["cpp"]


def test_files(outcome: Outcome) -> None:
    out = outcome.files[0].parent
    assert [path.name for path in outcome.files] == FILES
    check_files(out)
    assert json.loads((out / "figures.json").read_text()) == outcome.figures


def test_the_model_file_is_the_full_method(outcome: Outcome) -> None:
    learner = Learner.load(outcome.files[0], tiny_backbone())
    changes = {"rule": "evidence", "feature_layers": "several", "prompt_tasks": "first"}
    assert learner.settings == QUICK.replace(**changes) and learner.reader.rule == "evidence"
    assert [task.prompt is not None for task in learner.memory.tasks] == [True] + [False] * (len(learner.tasks) - 1)
    log = io.StringIO()
    tell_files(outcome, Console(file=log, width=200))
    assert f"Saved the model ({outcome.files[0].stat().st_size:,} bytes), reloaded it" in log.getvalue()
    assert "scores equal to the last bit" in log.getvalue()


@pytest.mark.usefixtures("no_tsne")
def test_reloading_to_other_scores_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Learner.load

    def other(path: Path, backbone: object = None) -> Learner:
        learner = load(path, tiny_backbone())
        learner.forget("ant")
        return learner

    monkeypatch.setattr(demo.Learner, "load", other)
    assert "SCORES DIFFER" in small_demo(tmp_path).reloaded


@pytest.mark.usefixtures("no_tsne")
def test_the_same_seed_gives_the_same_figures(outcome: Outcome, tmp_path: Path) -> None:
    def lasting(one: Outcome) -> list[dict[str, object]]:
        rows = one.figures["variants"].values()
        return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]

    assert lasting(small_demo(tmp_path)) == lasting(outcome)
    assert lasting(small_demo(tmp_path, seed=1)) != lasting(outcome)
    check_files(tmp_path)  # those of the last time are replaced


def test_shown_figures_are_those_measured(outcome: Outcome) -> None:
    out = io.StringIO()
    show(outcome, Console(file=out, width=200))
    for variant in outcome.figures["variants"].values():
        assert f"{variant['last_accuracy']:.2f} %" in out.getvalue()
    for name in ("baseline", "cpp", "protosteer"):
        assert f"{name}: accuracy in percent" in out.getvalue()
    assert sentence(outcome.figures["variants"]) in out.getvalue()


def test_a_bad_result_is_told_as_such() -> None:
    def row(accuracy: float, passes: float = 1.0, error: float = 50.0) -> dict[str, float]:
        return {
            "last_accuracy": accuracy, "last_forgetting": 1.0, "bytes_per_class": 100.0, "passes_per_image": passes,
            "calibration_error": error,
        }  # fmt: skip

    told = sentence({"baseline": row(90.0), "cpp": row(80.0, 2.5), "protosteer": row(82.5, 1.25, 3.25)})
    assert "7.5 points fewer than class means, 2.5 points more than CPP" in told
    assert "in 1.25 passes per image (CPP: 2.50)" in told and "3.2 points off (CPP's: 50.0)" in told


@pytest.mark.usefixtures("no_tsne")
def test_a_full_disk_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "write_atomically", full)
    with expect_error("cannot-write"):
        small_demo(tmp_path)


def test_the_tsne_shows_each_image_under_the_prompt_that_won(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, learner = small_stream(), Learner(tiny_backbone(), QUICK)
    for task in stream:
        learner.learn((task.train, task.train_labels), task.name)
    monkeypatch.setattr(plots, "tsne_before_after", lambda *given: given)
    before, after, labels, *_ = demo._draw_pictures(outcome.figures["variants"], learner, stream)["tsne.png"]
    before, after = torch.from_numpy(before), torch.from_numpy(after)
    assert labels == [label for task in stream for label in task.test_labels]
    pixels = torch.cat([task.test.pixels(range(12)) for task in stream])
    assert torch.allclose(before, learner.backbone.embed_pixels(pixels), atol=1e-5)
    under = [learner.backbone.embed_pixels(pixels, task.prompt) for task in learner.memory.tasks]
    nearest = torch.stack([(after - u).abs().amax(dim=1) for u in under]).amin(dim=0)
    assert float(nearest.max()) < 1e-5
    # The best score of every image is the one that its embedding in the picture has.
    values = torch.cat([c.values.means for task in learner.memory.tasks for c in task.classes])
    cosine = torch.nn.functional.cosine_similarity(after[:, None], values[None], dim=2).amax(dim=1)
    assert torch.allclose(cosine, learner.predict(pixels).scores.amax(dim=1), atol=1e-5)


@pytest.mark.usefixtures("no_tsne")
@pytest.mark.parametrize("own", [False, True])
def test_photographs_of_ones_own_or_those_that_are_always_there(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pets" if own else None
    for name in ("ant", "bee", "cat") if own else ():
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (20, 20), (60 * number, 0, 200)).save(tmp_path / "pets" / name / f"{number}.png")
    asked: list[str] = []

    def load(name: str, weights: None, precision: str) -> demo.Backbone:
        asked.append(name)
        return tiny_backbone()

    monkeypatch.setattr(demo.Backbone, "load", load)
    monkeypatch.setattr(demo, "PHOTOS", QUICK)
    log = Console(file=io.StringIO())
    outcome = demo.run_photos(tmp_path / "out", 0, log, folder, None, None)
    assert asked == ["mini"]
    assert outcome.figures["stream"] == ("folder:pets" if own else "split-details")
    assert (tmp_path / "out" / "photos.protosteer").is_file()


@pytest.mark.usefixtures("no_tsne")
def test_without_a_word_digits_and_photographs_are_learned_and_shown_on_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.Backbone, "load", lambda *name, **how: tiny_backbone())
    monkeypatch.setattr(demo, "split_digits", small_stream)
    monkeypatch.setattr(demo, "open_stream", lambda *words, **how: small_stream())
    monkeypatch.setattr(demo, "DEMO", QUICK)
    monkeypatch.setattr(demo, "PHOTOS", QUICK)
    printed = run_cli(capsys, "demo", "--json", "--out", tmp_path)
    figures = json.loads(printed.out)
    assert [*figures["variants"]] == [*VARIANTS] and [*figures["photos"]["variants"]] == [*demo.MAIN_VARIANTS]
    text = (tmp_path / demo.PAGE).read_text(encoding="utf-8")
    assert text.count("<figure>") == 8 and text.count('class="plot"') == 8 and "[d]og" in text and "://" not in text
    said = printed.err.splitlines()
    assert said[-1].endswith(str(tmp_path / demo.PAGE)) and all(escape(line) in text for line in said[-4:-1])


def test_the_demo_as_users_run_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "protosteer", "demo", "digits", "--json", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert set(figures) == ABOUT and figures["stream"] == split_digits().name
    variants = figures["variants"]
    assert list(variants) == list(VARIANTS) and all(set(v) - CPP_FIGURES == FIGURES for v in variants.values())
    check_files(tmp_path)
    assert "equal to the last bit" in done.stderr and "warning" not in done.stderr
    assert done.stderr.count("task 5 of 5: learned 8, 9; accuracy") == 5 and "\x1b" not in done.stderr
    told = [line.split(":")[0] for line in done.stderr.splitlines()]
    assert [name for name in told if name in VARIANTS] == list(VARIANTS)
    base, paper, ours = (variants[name] for name in ("baseline", "cpp", "protosteer"))
    assert paper["last_accuracy"] >= max(95.0, base["last_accuracy"] + 3.0)
    assert paper["last_forgetting"] <= 2.0
    assert ours["last_accuracy"] >= max(99.3, base["last_accuracy"] + 5.0)
    assert ours["last_forgetting"] <= 0.5
    assert ours["passes_per_image"] <= 1.2 and ours["calibration_error"] <= 5.0
