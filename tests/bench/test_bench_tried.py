"""Ideas that were tried for speed: each computes what the plain form does, and the command shows what it measured."""

from __future__ import annotations

import json
import multiprocessing
import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from benchmarks import (
    attention,
    chunked_step,
    compiled,
    int8,
    kept_memory,
    mixed_batches,
    patch_embedding,
    processes,
    shared_start,
    tools,
    tried,
    wait_policy,
    workers,
)

from protosteer.bench import subjects, timing
from protosteer.bench.timing import Ratio
from protosteer.settings import Settings
from protosteer.training import Head

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["token", "mean"])
def backbone(request):
    return subjects.small(depth=3, pool=request.param)


def assert_close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def strong(vit, count, length=1):
    """Prompts that change an embedding by much more than the tolerance."""
    return 50 * tools.prompts(vit, count, length)


@pytest.mark.parametrize("length", [1, 5])
def test_mixed_batches_give_what_groups_give(backbone, length, monkeypatch):
    monkeypatch.setattr(mixed_batches, "BATCH", 4)
    monkeypatch.setattr(mixed_batches, "LARGE", 3)
    with torch.no_grad():
        tokens = backbone.vit.trunk(tools.normalised(backbone, 7), 0)
    prompts = strong(backbone.vit, 5, length)
    rows, tasks = mixed_batches.pairs(7, 5)
    sizes = torch.bincount(tasks)
    assert len(rows) == 14 and set(rows.tolist()) == set(range(7)) and sizes.min() < 3 <= sizes.max()
    mixed = mixed_batches.mixed(backbone.vit, tokens, prompts, rows, tasks)
    for form in (mixed_batches.grouped, mixed_batches.combined):
        assert_close(mixed, form(backbone.vit, tokens, prompts, rows, tasks))
    assert (mixed[0] - mixed[1]).abs().max() > 1e-2  # one image under two prompts


@pytest.mark.parametrize("size", [16, 8])
def test_shared_patches_and_layer_1_give_what_whole_passes_give(backbone, size):
    pixels = F.interpolate(subjects.pictures(backbone, 3), size=size)
    some = [None, *strong(backbone.vit, 2, length=2)]
    whole = shared_start.from_pixels(backbone, pixels, some)
    tokens = backbone.vit.trunk(backbone.preprocessing(pixels), 0)
    assert len(whole) == 3 and (whole[0] - whole[1]).abs().max() > 1e-2
    for other in (
        shared_start.from_patches(backbone, pixels, some),
        shared_start.from_tokens(backbone.vit, tokens, some),
        shared_start.from_layer1(backbone.vit, tokens, some),
    ):
        for one, another in zip(whole, other, strict=True):
            assert_close(one, another)


def test_int8_is_near_float32_and_leaves_the_vit_as_it_was(backbone):
    images, before = tools.normalised(backbone, 4), backbone.vit.state_dict()
    other = int8.quantised(backbone.vit)
    assert not isinstance(other.blocks[0].mlp.fc1, torch.nn.Linear)
    assert isinstance(other.blocks[-1].mlp.fc1, torch.nn.Linear)
    apart = int8.differences(backbone.vit, other, images)
    assert apart.shape == (4,) and 0 < apart.max() < 0.01
    assert all(torch.equal(value, backbone.vit.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("kind", [patch_embedding.ChannelsLast, patch_embedding.Unfolded])
def test_other_patch_embeddings_give_the_same_tokens(backbone, kind):
    images = tools.normalised(backbone, 3) + torch.randn(3, 3, 16, 16)  # no two pixels of a patch alike
    other = patch_embedding.with_embedding(backbone.vit, kind)
    assert isinstance(other.patch_embed, kind)
    assert_close(patch_embedding.tokens(other, images), patch_embedding.tokens(backbone.vit, images))


def test_written_out_attention_is_the_fused_one():
    projected = torch.randn(2, 5, 3 * 4 * 6)
    for work in (attention.forward, attention.gradient):
        assert_close(
            work(attention.explicit, projected, 4), work(F.scaled_dot_product_attention, projected, 4)
        )


@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_chunks_do_not_change_the_gradient(backbone, chunk):
    torch.manual_seed(0)
    head = Head(backbone.dim, chunked_step.CLASSES, Settings(neck_hidden=16)).double()
    vit = tools.shortened(backbone.vit, 3).double()  # gradients of so small a ViT are tiny
    prompt = strong(vit, 1)[0].double().requires_grad_()
    given = (vit, head, tools.normalised(backbone, 12).double(), prompt)
    whole = chunked_step.chunked(*given, 12)
    assert whole.shape == prompt.shape and whole.abs().max() > 1e-10
    torch.testing.assert_close(chunked_step.chunked(*given, chunk), whole, rtol=1e-6, atol=1e-16)


def test_a_shortened_vit_has_the_first_layers_of_the_long_one(backbone):
    short, images = tools.shortened(backbone.vit, 2), tools.normalised(backbone, 2)
    assert (short.config.depth, backbone.vit.config.depth) == (2, 3)
    assert (short.config.pool, backbone.vit.config.pool) == ("mean", backbone.vit.config.pool)
    norm = backbone.vit.norm if backbone.vit.config.pool == "token" else backbone.vit.fc_norm
    assert_close(short(images), norm(backbone.vit.trunk(images, 2)[:, 1:].mean(dim=1)))
    assert short(images, strong(short, 1)[0]).shape == (2, backbone.dim)


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when a side says so: clock[0] is the second that it is now."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def takes(clock, seconds):
    def side():
        clock[0] += seconds

    return side


def test_plain_time_stands_above_and_short_sides_are_looped(clock, monkeypatch):
    monkeypatch.setattr(tools, "LEAST_SECONDS", 0.5)
    idea = tools.Idea("quick", "slow / quick", takes(clock, 0.125), ["a note"])
    (ratio,) = tools.compare(takes(clock, 0.5), [idea], repeats=2, images=5)
    assert (ratio.value, ratio.target, ratio.spread) == (4, 1, 0)
    assert ratio.notes == ["100 against 25 ms an image", "a note"]
    assert clock[0] == 0.625 * (
        1 + 2 * 4
    )  # once to see how long they take, then twice as often as fills the least


@pytest.mark.parametrize("repeats", [1, 3])
def test_long_sides_run_once_per_repeat(repeats, clock):
    ideas = [tools.Idea(name, "", takes(clock, seconds)) for name, seconds in (("a", 4), ("b", 0.5))]
    ratios = tools.compare(takes(clock, 2), ideas, repeats, images=1)
    assert [(ratio.name, ratio.value) for ratio in ratios] == [("a", 0.5), ("b", 4)]
    assert clock[0] == 6.5 * repeats


def test_what_cannot_be_compiled_is_reported_in_one_line():
    def fails():
        raise RuntimeError("no compiler\nand much more")

    with pytest.raises(tools.NotHere, match=r"^RuntimeError: no compiler$"):
        compiled._seconds(fails)


def test_a_worker_has_its_own_environment_and_tells_the_time_of_a_run():
    # A text, because a function of this module would make the worker import all that is imported here.
    job = "lambda seconds: __import__('time').sleep(seconds if 'TRIED' in __import__('os').environ else 0)"
    with workers.Worker(eval, job, env={"TRIED": "yes"}) as worker:
        assert "TRIED" not in os.environ
        assert (
            0.2 <= workers.together([worker], 0.2) < 2
        )  # without the start of a process, which takes longer


def test_a_busy_core_is_free_again_afterwards():
    with workers.busy_core():
        (process,) = multiprocessing.active_children()
        assert process.is_alive()
    assert not multiprocessing.active_children()


def test_own_times_are_what_workers_say_without_the_first_run():
    said = {"a": iter([9.0, 1.0, 2.0]), "b": iter([8.0, 3.0, 4.0])}
    assert workers.own_times({name: lambda s=s: next(s) for name, s in said.items()}, repeats=2) == {
        "a": [1, 2],
        "b": [3, 4],
    }


def test_an_environment_is_changed_for_a_while(monkeypatch):
    monkeypatch.setenv("TRIED", "before")
    with workers.environment({"TRIED": None, "TRIED_TOO": "now"}):
        assert "TRIED" not in os.environ and os.environ["TRIED_TOO"] == "now"
    assert os.environ["TRIED"] == "before" and "TRIED_TOO" not in os.environ


def test_jobs_of_workers_run(monkeypatch):
    monkeypatch.setattr(processes, "vit_tiny", subjects.small)
    set_threads = []
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    monkeypatch.setattr(processes, "CASES", {"vit_tiny": (6, 2), "nano": (4, 1)})
    embed = processes.embedding(threads=2)
    assert [part.shape for part in embed("vit_tiny", 6)] == [(2, 24)] * 3
    assert [part.shape for part in embed("nano", 2)] == [(1, 128)] * 2
    assert len(wait_policy.steps()()) == wait_policy.STEPS and set_threads == [2, 2]


@pytest.fixture
def two_ideas(monkeypatch):
    def measured(repeats):
        return [Ratio.of("first_nano", "slow / quick", [4.0] * repeats, [2.0] * repeats, 1.0, ["a note"])]

    def absent(repeats):
        raise tools.NotHere("no compiler")

    monkeypatch.setattr(tried, "IDEAS", {"first": measured, "second": absent})


def test_json_has_every_figure_and_why_one_is_missing(two_ideas, capsys):
    tried.main(["--json", "--repeats", "2"])
    figures = json.loads(capsys.readouterr().out)
    assert figures["ratios"] == {
        "first_nano": {
            "value": 2.0,
            "target": 1.0,
            "spread": 0.0,
            "about": "slow / quick",
            "notes": ["a note"],
        }
    }
    assert figures["not_here"] == {"second": "no compiler"}


def test_table_has_notes_and_only_what_was_asked_for(two_ideas, capsys):
    tried.main(["first"])
    out = capsys.readouterr().out
    assert "first_nano" in out and "2.00" in out and "a note" in out and "second" not in out
    tried.main([])
    assert "not measured: no compiler" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nothing"], ["--repeats", "0"]])
def test_mistakes_end_in_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        tried.main(arguments)
    assert end.value.code == 2
    assert arguments[-1] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("make", [kept_memory.prediction, kept_memory.training])
def test_keeping_memory_changes_no_result(make, monkeypatch):
    for name, value in {"IMAGES": 3, "BATCH": 2, "vit_tiny": lambda: subjects.small()}.items():
        monkeypatch.setattr(kept_memory, name, value)
    monkeypatch.setattr(kept_memory, "keep_freed_memory", lambda: told.append(True))
    told: list[bool] = []
    results = [make(kept)() for kept in (False, True)]
    assert told == [True]
    if make is kept_memory.prediction:
        assert torch.equal(results[0].scores, results[1].scores)
