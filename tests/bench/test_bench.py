"""Ratios come from two sides that run in turn and do the same work; names, order, JSON and text of the report."""

import inspect
import io
import json
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from conftest import train
from expect import expect_error
from protosteer.bench import bf16, prediction, report, scaling, training
from protosteer.bench.harness import Ratio, by_layer, interleaved, learner_for, memory_of, pictures, quarters
from protosteer.bench.report import as_json, run_all, table
from protosteer.bench.training import Step, by_pillow, naive, ours
from protosteer.cli.benchmarks import bench
from protosteer.data.augment import Augmentation
from protosteer.data.transforms import Preprocessing
from protosteer.errors import SettingsError
from protosteer.learner import Learner
from protosteer.settings import Settings
from protosteer.util import training_state
from vit_toys import small

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes, and a small neck: its 2048 units would take most of the time here."""
    monkeypatch.setattr(training, "Settings", partial(Settings, neck_hidden=32))
    small_sizes = {
        bf16: {"vit_tiny": small},
        training: {"vit_tiny": small, "BATCH": 4, "BATCH_NANO": 4},
        prediction: {"vit_tiny": small, "IMAGES": 4, "NANO_IMAGES": 4, "BATCHES": (2, 4)},
        scaling: {"vit_tiny": small, "CLASSES": (50, 100), "TARGET_CLASSES": 100},
    }
    for module, values in small_sizes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


def test_a_ratio_is_of_medians_and_its_spread_of_single_repeats() -> None:
    ratio = Ratio("", "", [2.0, 4.0, 9.0], [1.0, 2.0, 3.0], 1.0)
    assert (ratio.value, ratio.spread) == (2.0, 1.0)


def test_sides_take_turns_and_the_first_round_is_not_counted() -> None:
    ran: list[str] = []
    times = interleaved({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, 2)
    assert "".join(ran) == "baabba" and [len(seconds) for seconds in times.values()] == [2, 2]


def test_late_prompts_are_compared_with_prompts_in_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {0: [9.0], 1: [6.0], 4: [4.0]}
    monkeypatch.setattr("protosteer.bench.harness.interleaved", lambda sides, _: seconds)
    step, late = by_layer("training_step_nano", "", 20, dict.fromkeys(seconds, print), 1.6, 1)
    assert (step.name, step.value, step.target) == ("training_step_nano", 1.5, 1.6)
    assert (late.name, late.value, late.target) == ("late_training_nano_k4", 1.5, 1.0)
    assert [list(quarters(small(depth))) for depth in (12, 3)] == [[1, 4, 7, 10], [1, 2]]


def test_late_prompts_retrieve_the_same_candidates() -> None:
    backbone = small(depth=4)
    pixels = pictures(backbone, 20)
    everywhere, late = (learner_for(backbone, k) for k in (1, 3))
    assert everywhere.memory.tasks[0].prompt.shape[0] == 4 and late.memory.tasks[0].prompt.shape[0] == 2
    candidates = everywhere.predict(pixels).candidates
    assert candidates == late.predict(pixels).candidates
    assert len({tuple(tasks) for tasks in candidates}) > 3  # images differ in what they retrieve


@pytest.mark.parametrize("passes", [2, 9])
def test_the_limit_makes_the_passes_it_says(passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, made = small(), []
    monkeypatch.setattr(backbone.vit, "forward", lambda images: made.append(len(images)))
    prediction.plain_passes(backbone.vit, torch.zeros(3, 3, 16, 16), passes)
    assert sum(made) == passes and max(made) <= 3


def seeded(make: Callable[..., Step], *arguments: object) -> Step:
    """A step whose random start is always the same."""
    torch.manual_seed(1)
    return make(*arguments)


@pytest.mark.parametrize("from_layer", [1, 3])
def test_our_step_is_that_of_training(monkeypatch: pytest.MonkeyPatch, from_layer: int) -> None:
    """The step draws its prototypes first, so training starts from its random state and draws no batches."""
    backbone = small(depth=4)
    pixels = pictures(backbone, 20)
    step = seeded(ours, backbone, pixels, from_layer)
    state = torch.get_rng_state()
    step()

    def in_order(count: int, _: int, generator: torch.Generator) -> list[torch.Tensor]:
        generator.set_state(state)
        return [torch.arange(count)]

    monkeypatch.setattr(training_state, "epoch_batches", in_order)
    settings = Settings.preset("paper", prompt_start="random", epochs=1, batch_size=20, neck_hidden=32)
    settings = settings.replace(prompt_from_layer=from_layer)
    trained = train(backbone, pixels, step.labels, settings, anchors=step.prototypes, seed=1)
    assert step.prompt.shape == (5 - from_layer, 1, backbone.dim) and step.prompt.grad.norm() > 0
    assert torch.equal(step.prompt, trained.prompt)


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_the_reference_step_has_the_same_gradient(monkeypatch: pytest.MonkeyPatch, pool: str) -> None:
    backbone, images = small(4, pool), torch.randn(20, 3, 16, 16)
    monkeypatch.setattr(training, "by_pillow", lambda _, pixels: images)
    monkeypatch.setattr(training, "Augmentation", lambda _: lambda pixels: images)
    steps = [seeded(make, backbone, pictures(backbone, 20)) for make in (naive, ours)]
    for step in steps:
        torch.manual_seed(2)  # of the prototypes' noise
        step()
    expected, found = (step.prompt.grad for step in steps)
    assert (expected - found).norm() < 1e-4 * expected.norm()
    for theirs, mine in zip(steps[0].head.parameters(), steps[1].head.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, mine.grad, rtol=1e-3, atol=1e-6)


def test_pillow_augments_as_we_do() -> None:
    """The same choices, drawn from one seed; other choices differ, so that the agreement is not by chance."""
    augment = Augmentation(Preprocessing(48, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
    smooth = torch.rand((24, 3, 5, 5), generator=torch.Generator().manual_seed(0)) * 220
    pixels = F.interpolate(smooth, size=(60, 60), mode="bicubic").clamp(0, 220).byte()
    torch.manual_seed(3)
    pillow = by_pillow(augment, pixels)
    for seed, agrees in ((3, True), (4, False)):
        torch.manual_seed(seed)
        error = (pillow - augment(pixels)).abs().mean((1, 2, 3))
        assert bool(error.max() < 0.012) is agrees


def test_overhead_is_a_whole_match_from_ready_embeddings() -> None:
    learner = Learner(small(), Settings.preset("paper"))
    learner.memory = memory = memory_of(small(), tasks=4, classes=10)
    embeddings = torch.randn(6, small().dim)
    matches = scaling.overhead(learner, embeddings)
    classes = [record for task in memory.tasks for record in task.classes]
    cosines = [F.cosine_similarity(embeddings[:, None], c.values.means, dim=2).amax(dim=1) for c in classes]
    torch.testing.assert_close(matches.scores, torch.stack(cosines, dim=1))
    assert int(matches.passes.sum()) == 6 + sum(map(len, matches.candidates))


def test_the_scaling_ratio_is_the_backbones_part_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"backbone": [0.03 * 4], "rest": [0.01 * scaling.MAX_IMAGES]}
    matches = SimpleNamespace(passes=torch.full((scaling.MAX_IMAGES,), 3))
    monkeypatch.setattr(scaling, "best_batch", lambda _: torch.zeros(4, 3, 16, 16))
    monkeypatch.setattr(scaling, "interleaved", lambda *_: seconds)
    monkeypatch.setattr(scaling, "overhead", lambda *_: matches)
    for ratio in scaling.run(1):
        assert (ratio.value, ratio.target) == (pytest.approx(0.9), 0.95)
        assert [note.split(" classes")[0] for note in ratio.notes] == ["50", "100"]


def test_every_subject_is_in_the_help_and_can_be_measured() -> None:
    told = inspect.signature(bench).parameters["subjects"].annotation
    assert all(subject in told for subject in report.SUBJECTS)
    before, messages = torch.get_rng_state(), []
    ratios, skipped = run_all(None, 1, messages.append, "bf16")
    assert torch.equal(before, torch.get_rng_state()) and len(messages) == len(report.SUBJECTS) and not skipped
    steps = ["predict", "late_predict_k2", "predict_nano", "late_predict_nano_k2"]
    steps += ["training_step", "late_training_k2", "training_step_nano", "late_training_nano_k2"]
    steps += ["predict_bf16", "training_step_bf16"]
    assert [r.name for r in ratios] == [*steps, "many_classes", "many_classes_evidence"]
    assert all(ratio.value > 0 for ratio in ratios)


def test_what_cannot_be_measured_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "cpu_has_bf16", lambda: False)
    messages: list[str] = []
    ratios, skipped = run_all(["bf16"], 1, messages.append)
    assert not ratios and list(skipped) == ["bf16"] and messages == [f"skipping bf16: {skipped['bf16']}"]


def test_bf16_is_measured_against_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of both ratios is the same as in fp32; ours computes in bf16."""
    kinds = []
    for module in (prediction, training):
        monkeypatch.setattr(module, "by_layer", lambda *given: [given])
    predict, step = bf16.run(1)
    original = torch.autocast.__enter__
    monkeypatch.setattr(torch.autocast, "__enter__", lambda self: kinds.append(self.fast_dtype) or original(self))
    for (_, _, _, sides, target, _), expected in ((predict, 1.7), (step, 1.6)):
        sides[0]()
        assert not kinds and list(sides) == [0, 1] and target == expected
        sides[1]()
        assert set(kinds) == {torch.bfloat16}
        kinds.clear()


def test_subjects_run_once_each_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SimpleNamespace(run=lambda repeats: [Ratio("one", "", [float(repeats)], [1.0], 1.0)])
    monkeypatch.setattr(report, "SUBJECTS", ("first", "second"))
    for name in report.SUBJECTS:
        monkeypatch.setitem(sys.modules, f"protosteer.bench.{name}", subject)
    messages: list[str] = []
    assert [r.value for r in run_all(["second", "first", "second"], 4, messages.append)[0]] == [4, 4]
    assert [message.split()[1] for message in messages] == ["first", "second"]
    with expect_error("unknown-subject", SettingsError, name="third"):
        run_all(["first", "third"], 1, messages.append)
    with expect_error("too-few-repeats", SettingsError):
        run_all(None, 0, messages.append)
    assert len(messages) == 2


LONG = "a sentence that goes on and on, as such sentences do, until no terminal is wide enough to hold it in one line"
RATIOS = [
    Ratio("predict", "limit / ours", [0.97, 1.0], [1.0, 1.0], 0.95, ["[bold]12.3[/bold] images/s", LONG]),
    Ratio("late_training_k10", "this way / that way", [1.0], [2.0], 1.0),
]


def test_json_has_ratios_notes_and_machine() -> None:
    results = json.loads(json.dumps(as_json(RATIOS, {"bf16": "no such instructions"})))
    assert results["skipped"] == {"bf16": "no such instructions"} and as_json(RATIOS)["skipped"] == {}
    assert list(results["ratios"]) == ["predict", "late_training_k10"]
    assert results["ratios"]["predict"] == pytest.approx({"value": 0.985, "target": 0.95, "spread": 0.03})
    assert results["notes"] == {"predict": RATIOS[0].notes, "late_training_k10": []}
    assert results["machine"]["processor"] and results["versions"]["torch"] and results["threads"]


def test_the_table_fits_and_is_plain_text_in_a_file() -> None:
    file = io.StringIO()
    Console(file=file, width=60).print(*table(RATIOS), sep="\n")
    text = " ".join(file.getvalue().split())
    assert "\x1b" not in text and max(map(len, file.getvalue().splitlines())) <= 60
    assert "predict 0.98 0.95 0.03 yes late_training_k10 0.50 1.00 0.00 no" in text
    assert "[bold]12.3[/bold] images/s" in text and LONG in text  # not taken for markup
