"""fp32, bf16 and auto: what each computes, what it does not touch, and what does not depend on it."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import StepCallback, easy_task, tiny_backbone, train
from expect import expect_error
from protosteer.backbones import NANO, Backbone, precision
from protosteer.bench.harness import pictures
from protosteer.errors import SettingsError
from protosteer.paper.vit import attend
from protosteer.settings import Settings
from protosteer.util import system
from protosteer.util.system import cpu_has_bf16
from vit_toys import small

QUICK = Settings.preset("paper", epochs=3, batch_size=8, neck_hidden=16, augmentation="none")


@pytest.fixture
def pixels() -> Tensor:
    return easy_task(["ant", "bee", "cat"])[0]


def similar(one: Tensor, other: Tensor) -> float:
    return float(F.cosine_similarity(one.flatten(1), other.flatten(1)).min())


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("model name: x\nflags\t\t: fpu avx512_bf16 sse\nflags: fpu\n", True),
        ("flags : fpu amx_bf16 amx_tile", True),
        ("flags : fpu avx512f avx512bf16x\nbugs : avx512_bf16", False),
        ("Features : fp asimd", False),
    ],
)
def test_a_processor_has_bf16_if_its_flags_say_so(text: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "open", lambda *_, **__: io.StringIO(text), raising=False)
    assert cpu_has_bf16.__wrapped__() is has


def test_without_a_list_of_flags_there_is_no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(system, "open", missing, raising=False)
    assert cpu_has_bf16.__wrapped__() is False


@pytest.mark.parametrize("has", [True, False])
def test_auto_is_bf16_where_the_processor_has_it(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: has)
    assert tiny_backbone().precision == "fp32"  # as the tests' environment says
    monkeypatch.delenv(precision.VARIABLE)
    assert tiny_backbone().precision == ("bf16" if has else "fp32")
    assert Backbone.load(NANO, precision="fp32").precision == "fp32"
    assert Backbone.load(NANO, precision="bf16").precision == "bf16"
    monkeypatch.setenv(precision.VARIABLE, "bf16")
    assert tiny_backbone().precision == "bf16" and tiny_backbone().with_auto_as_fp32().precision == "fp32"
    assert Backbone.load(NANO, precision="fp32").precision == "fp32"


def test_an_unknown_precision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with expect_error("bad-setting", SettingsError, name="precision"):
        Backbone.load(NANO, precision="fp8")
    monkeypatch.setenv(precision.VARIABLE, "half")
    with expect_error("bad-setting", SettingsError, name=precision.VARIABLE):
        _ = tiny_backbone().precision


def test_another_precision_shares_the_weights_and_leaves_the_original_alone() -> None:
    full = tiny_backbone().in_precision("fp32")
    rounded = full.in_precision("bf16")
    assert rounded.vit is full.vit and rounded.fingerprint == full.fingerprint
    assert (full.precision, rounded.precision) == ("fp32", "bf16") and full.in_precision("fp32") is full
    assert rounded.with_auto_as_fp32() is rounded  # it was asked for


@pytest.mark.parametrize("keys", [1, 5])
def test_attention_in_bf16_is_attention_but_for_rounding(keys: int) -> None:
    draw = torch.Generator().manual_seed(0)
    rounded = [torch.randn(2, 3, n, 8, generator=draw).bfloat16() for n in (4, keys, keys)]
    full = [t.float() for t in rounded]
    torch.testing.assert_close(attend(*rounded).float(), F.scaled_dot_product_attention(*full), atol=0.03, rtol=0.02)
    assert torch.equal(attend(*full), F.scaled_dot_product_attention(*full))  # fp32 is what it always was


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_only_the_arithmetic_of_forward_passes_is_rounded(pool: str) -> None:
    full = small(4, pool)
    rounded, images = full.in_precision("bf16"), full.preprocessing(pictures(full, 6))
    prompt = torch.randn(full.prompt_shape(2)).requires_grad_()
    gradients = []
    for backbone in (full, rounded):
        prompt.grad = None
        embeddings = backbone.embed(images, prompt)
        embeddings[:, 0].sum().backward()
        gradients.append(prompt.grad)
    assert {t.dtype for t in (embeddings, prompt.grad, rounded.tokens(images), rounded.trunk(images, 2))} == {
        torch.float32
    }
    assert all(parameter.dtype == torch.float32 for parameter in rounded.vit.parameters())
    assert similar(*(gradient.flatten()[None] for gradient in gradients)) > 0.99
    for given in (None, prompt.detach()):
        one, other = full.embed(images, given), rounded.embed(images, given)
        assert not torch.equal(one, other) and similar(one, other) > 0.999


def test_training_in_bf16_keeps_prompt_head_and_optimiser_in_fp32(pixels: Tensor) -> None:
    kinds: set[torch.dtype] = set()

    def look(state: object) -> None:
        kinds.update(p.dtype for p in state.parameters.values())
        kinds.update(t.dtype for own in state.optimiser.state.values() for t in own.values())

    labels = torch.arange(3).repeat_interleave(8)
    full, rounded = (
        train(tiny_backbone().in_precision(name), pixels, labels, QUICK, callbacks=[StepCallback(look)])
        for name in ("fp32", "bf16")
    )
    assert kinds == {torch.float32}
    assert not torch.equal(full.prompt, rounded.prompt)
    assert full.epochs[-1].loss == pytest.approx(rounded.epochs[-1].loss, abs=0.05)


def test_bf16_gives_the_same_bits_each_time(pixels: Tensor) -> None:
    backbone, labels = tiny_backbone().in_precision("bf16"), torch.arange(3).repeat_interleave(8)
    one, other = (train(backbone, pixels, labels, QUICK).prompt for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(backbone.embed_pixels(pixels, one), backbone.embed_pixels(pixels, other))


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_an_embedding_does_not_depend_on_its_batch(name: str) -> None:
    """In fp32 but for rounding; in bf16 to the bit on processors that have it, since its sums do not depend on it."""
    backbone = Backbone.load(NANO, precision=name)
    images = backbone.preprocessing(pictures(backbone, 7))
    shared = 0.1 * torch.randn(backbone.prompt_shape(1))
    for prompt in (None, shared, shared.expand(7, *shared.shape)):
        together = backbone.embed(images, prompt)
        for rows in ([2], [0, 5, 2, 6]):
            own = prompt[rows] if prompt is not None and prompt.ndim == 4 else prompt
            alone = backbone.embed(images[rows], own)
            torch.testing.assert_close(alone, together[rows], atol=1e-5 if name == "fp32" else 0.02, rtol=0)
            assert name == "fp32" or not cpu_has_bf16() or torch.equal(alone, together[rows])
