"""vit.py against two oracles: timm for the plain forward, a naive concatenating forward for prompts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from expect import expect_error
from protosteer.backbones.build_vit import load_vit, multiply_adds
from protosteer.backbones.checkpoint_io import read_checkpoint
from protosteer.backbones.prompting import all_tokens
from protosteer.errors import DataError
from protosteer.paper.vit import ViT, ViTConfig
from timm_oracle import import_timm, randomise, timm_embedding


def ours(model: nn.Module, folder: Path, heads: int, image_size: int | None = None) -> ViT:
    """timm's parameters in our ViT, by way of a file."""
    path = folder / "timm.safetensors"
    save_file(model.state_dict(), path)
    return load_vit(read_checkpoint(path), heads, image_size)[0]


FAMILIES: dict[str, dict[str, Any]] = {
    "vit, deit, dino": {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3},
    "other patch": {"img_size": 42, "patch_size": 14, "embed_dim": 64, "depth": 2, "num_heads": 4},
    "one layer": {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2},
    "dinov2": {"img_size": 28, "patch_size": 7, "init_values": 0.1},
    "dinov2 reg4": {"img_size": 28, "patch_size": 7, "init_values": 0.1, "reg_tokens": 4, "no_embed_class": True},
    "registers with positions": {"reg_tokens": 2},
    "deit3": {"init_values": 0.1, "no_embed_class": True},
    "mae fine-tuned": {"global_pool": "avg"},
    "mean over patches, not registers": {"global_pool": "avg", "reg_tokens": 3, "no_embed_class": True},
    "no qkv bias": {"qkv_bias": False},
    "other mlp": {"mlp_ratio": 2.5},
}
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 7}


@pytest.mark.parametrize("std", [0.2, 0.004])  # with small tokens the epsilon of the norms shows
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_forward_equals_timm(family: str, std: float, tmp_path: Path) -> None:
    timm = import_timm()
    options = SMALL | FAMILIES[family]
    model = timm.VisionTransformer(**options)
    randomise(model, std)
    images = torch.randn(3, 3, options["img_size"], options["img_size"])
    expected = timm_embedding(model, images)
    assert expected.std(dim=0).mean() > 0.01 or std < 0.2  # the images are told apart, so agreement means something
    assert (ours(model, tmp_path, options["num_heads"])(images) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["vit, deit, dino", "dinov2 reg4", "mae fine-tuned", "registers with positions"])
@pytest.mark.parametrize("grid", [2, 6, 7])
def test_resized_input_equals_timm(family: str, grid: int, tmp_path: Path) -> None:
    timm = import_timm()
    options = SMALL | FAMILIES[family]
    small = timm.VisionTransformer(**options)
    randomise(small, std=0.5)
    size = grid * options["patch_size"]
    large = timm.VisionTransformer(**options | {"img_size": size})
    large.load_state_dict(timm.checkpoint_filter_fn(small.state_dict(), large))
    images = torch.randn(2, 3, size, size)
    vit = ours(small, tmp_path, options["num_heads"], size)
    assert vit.config.image_size == size and (vit(images) - timm_embedding(large, images)).abs().max() <= 1e-4


@pytest.mark.parametrize("size", [224, 160])
def test_real_deit_tiny_equals_timm(size: int, shared: Path) -> None:
    path = shared / "weights" / "deit_tiny_patch16_224.safetensors"
    if not path.is_file():
        pytest.skip("no DeiT-Tiny weights in the shared folder")
    timm = import_timm()
    checkpoint = read_checkpoint(path)
    shape = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3, "num_classes": 0}
    model = timm.VisionTransformer(img_size=size, **shape)
    model.load_state_dict(timm.checkpoint_filter_fn(dict(checkpoint.tensors), model))
    images = torch.randn(2, 3, size, size)
    vit, _ = load_vit(checkpoint, image_size=size)
    assert vit.config.heads == 3 and (vit(images) - timm_embedding(model, images)).abs().max() <= 1e-4


@pytest.mark.parametrize("registers", [0, 3])
def test_operations_are_those_that_torch_counts(registers: int) -> None:
    vit = ViT(ViTConfig(16, 4, 24, 3, 3, 40, registers=registers))
    # Of the ways to compute attention it knows the plain one.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        vit.trunk(torch.randn(1, 3, 16, 16), 3)
    assert counter.get_total_flops() == 2 * multiply_adds(vit.config)


def naive_tokens(vit: ViT, images: Tensor, prompt: Tensor) -> Tensor:
    """The definition: [class, p_i, patches] go through layer i whole; before the next, p_i's outputs go."""
    w, config, batch = dict(vit.named_parameters()), vit.config, len(images)
    patches = F.conv2d(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=config.patch_size)
    tokens = patches.flatten(2).transpose(1, 2) + w["pos_embed"][:, 1:]
    first = (w["cls_token"] + w["pos_embed"][:, :1]).expand(batch, -1, -1)
    registers = [w["reg_token"].expand(batch, -1, -1)] if config.registers else []
    x = torch.cat([first, *registers, tokens], dim=1)
    prompts = prompt if prompt.ndim == 4 else prompt.expand(batch, -1, -1, -1)  # [B, S, L, D]
    layers, length = prompts.shape[1:3]
    entry = 0 if layers == 1 else config.depth - layers  # a deep prompt belongs to the last layers
    for i in range(config.depth):
        if layers > 1 and i > entry:
            x = torch.cat([x[:, :1], x[:, 1 + length :]], dim=1)
        if 0 <= i - entry < layers:
            x = torch.cat([x[:, :1], prompts[:, i - entry], x[:, 1:]], dim=1)
        x = naive_layer(w, f"blocks.{i}.", x, config.heads)
    return x


def naive_norm(vit: ViT, x: Tensor) -> Tensor:
    w, name = dict(vit.named_parameters()), "norm" if vit.config.pool == "token" else "fc_norm"
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)


def naive_forward(vit: ViT, images: Tensor, prompt: Tensor) -> Tensor:
    x = naive_tokens(vit, images, prompt)
    return naive_norm(vit, x[:, 0] if vit.config.pool == "token" else x[:, -vit.config.patches :].mean(dim=1))


def naive_layer(w: dict[str, nn.Parameter], at: str, x: Tensor, heads: int) -> Tensor:
    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{at}{name}.weight"], w[f"{at}{name}.bias"], 1e-6)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{at}{name}.weight"].T + w[f"{at}{name}.bias"]

    one: Tensor | float = 1.0
    q, k, v = (t.unflatten(2, (heads, -1)) for t in linear("attn.qkv", norm("norm1", x)).chunk(3, dim=2))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).div(q.shape[-1] ** 0.5).softmax(dim=-1)
    attended = linear("attn.proj", torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))
    x = x + w.get(f"{at}ls1.gamma", one) * attended
    return x + w.get(f"{at}ls2.gamma", one) * linear("mlp.fc2", F.gelu(linear("mlp.fc1", norm("norm2", x))))


VARIANTS = {
    "token": {},
    "token, registers, layer scale": {"registers": 2, "layer_scale": True},
    "mean": {"pool": "mean"},
    "mean, registers": {"pool": "mean", "registers": 3},
}


def random_vit(dtype: torch.dtype = torch.float32, **options: Any) -> ViT:
    shape = {"image_size": 16, "patch_size": 4, "dim": 24, "depth": 3, "heads": 3, "mlp_dim": 40}
    vit = ViT(ViTConfig(**shape | options)).to(dtype)
    randomise(vit)
    return vit


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("length", [1, 5, 50])
@pytest.mark.parametrize("layers", [1, 2, 3], ids=["shallow", "late", "deep"])
@pytest.mark.parametrize("each", [False, True], ids=["one prompt", "one per image"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompted_forward_equals_naive_concatenation(
    variant: str, each: bool, layers: int, length: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    vit = random_vit(dtype, **VARIANTS[variant])
    before = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    images, readout = torch.randn(4, 3, 16, 16, dtype=dtype), torch.randn(24, dtype=dtype)
    prompt = torch.randn(*([4] if each else []), layers, length, 24, dtype=dtype, requires_grad=True)

    def run(forward: Any) -> tuple[Tensor, Tensor]:
        output = forward(images, prompt)
        (gradient,) = torch.autograd.grad((output @ readout).sum(), prompt)
        return output.detach(), gradient

    output, gradient = run(vit)
    expected, expected_gradient = run(lambda x, p: naive_forward(vit, x, p))
    assert (output - expected).abs().max() <= tolerance and (gradient - expected_gradient).abs().max() <= tolerance
    # The comparison means something: the prompt matters to every image, every token has a gradient.
    assert (output - vit(images)).abs().amax(dim=1).min() > 1e-2
    assert gradient.abs().amax(dim=-1).min() > 20 * tolerance
    assert all(torch.equal(before[name], tensor) for name, tensor in vit.state_dict().items())


@pytest.mark.parametrize("layers", [1, 2, 3], ids=["shallow", "late", "deep"])
@pytest.mark.parametrize("each", [False, True], ids=["one prompt", "one per image"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_and_a_prompts_outputs_equal_naive_concatenation(variant: str, each: bool, layers: int) -> None:
    torch.manual_seed(0)
    vit = random_vit(torch.float64, **VARIANTS[variant])
    images, readout = torch.randn(4, 3, 16, 16).double(), torch.randn(24).double()
    prompt = torch.randn(*([4] if each else []), layers, 5, 24, dtype=torch.float64, requires_grad=True)
    found, expected = all_tokens(vit, images, prompt), naive_norm(vit, naive_tokens(vit, images, prompt))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    # What a head reads there depends on every layer of the prompt.
    gradients = [torch.autograd.grad((x[:, 1:6] @ readout).sum(), prompt)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=0)
    assert gradients[0].abs().amax(dim=-1).min() > 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_without_a_prompt(variant: str) -> None:
    vit, images = random_vit(**VARIANTS[variant]), torch.randn(4, 3, 16, 16)
    tokens = all_tokens(vit, images)
    assert tokens.shape == (4, 1 + vit.config.registers + vit.config.patches, 24)
    if vit.config.pool == "token":
        torch.testing.assert_close(tokens[:, 0], vit(images), atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_in_the_vit_receives_a_gradient_or_changes(variant: str) -> None:
    vit = random_vit(**VARIANTS[variant])
    before = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    prompt = torch.randn(3, 2, 24, requires_grad=True)
    optimizer = torch.optim.SGD([*vit.parameters(), prompt], lr=1.0)
    (vit(torch.randn(2, 3, 16, 16), prompt) @ torch.randn(24)).sum().backward()
    optimizer.step()
    assert prompt.grad is not None and all(p.grad is None and not p.requires_grad for p in vit.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in vit.state_dict().items())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("done", [0, 1])
def test_a_shared_trunk_changes_nothing(variant: str, done: int) -> None:
    vit, images = random_vit(**VARIANTS[variant]), torch.randn(4, 3, 16, 16)
    tokens = vit.trunk(images, done)
    for prompt in (None, torch.randn(2, 5, 24), torch.randn(4, 2, 1, 24)):
        assert torch.equal(vit.embed_tokens(tokens, done, prompt), vit(images, prompt))


def test_a_trunk_that_goes_too_far_is_rejected() -> None:
    vit, images = random_vit(), torch.randn(4, 3, 16, 16)
    for layers in (1, 3):
        with expect_error("prompt-enters-trunk", DataError, layers=1):
            vit.embed_tokens(vit.trunk(images, 1), 1, torch.zeros(layers, 1, 24))


def test_no_gradient_flows_through_the_layers_before_a_late_prompt() -> None:
    vit, prompt = random_vit(), torch.randn(2, 1, 24, requires_grad=True)
    seen: list[bool] = []
    for block in vit.blocks:
        block.register_forward_hook(lambda module, inputs, out: seen.append(out.requires_grad))
    vit(torch.randn(2, 3, 16, 16), prompt)
    assert seen == [False, True, True]


def test_each_image_meets_its_own_prompt() -> None:
    vit, images = random_vit(), torch.randn(3, 3, 16, 16)
    prompts = torch.randn(3, 3, 2, 24)
    together = vit(images, prompts)
    alone = torch.cat([vit(images[i : i + 1], prompts[i]) for i in range(3)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(4, 1, 24), (3, 0, 24), (3, 1, 23), (3, 24), (2, 3, 1, 24)])
def test_prompt_of_wrong_shape_is_rejected(shape: tuple[int, ...]) -> None:
    with expect_error("bad-prompt-shape", DataError, shape=list(shape)):
        random_vit()(torch.randn(4, 3, 16, 16), torch.zeros(shape))


def test_images_of_wrong_size_are_rejected() -> None:
    with expect_error("bad-image-shape", DataError, size=16):
        random_vit()(torch.randn(4, 3, 20, 20))


class Lora(nn.Linear):
    """A linear layer whose forward adds something, as loralib's does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.flip(-1).repeat(1, 1, 3)


def patched(linear: nn.Linear) -> None:
    plain = linear.forward
    linear.forward = lambda x: plain(x) + x.flip(-1).repeat(1, 1, 3)  # type: ignore[method-assign]


def subclassed(linear: nn.Linear) -> None:
    linear.__class__ = Lora


def hooked(linear: nn.Linear) -> None:
    linear.register_forward_hook(lambda _module, inputs, out: out + inputs[0].flip(-1).repeat(1, 1, 3))


def test_hooks_on_gradients_are_called() -> None:
    vit, seen = random_vit(), []
    vit.blocks[-1].attn.qkv.register_full_backward_pre_hook(lambda _module, gradients: seen.append(gradients))
    vit(torch.randn(2, 3, 16, 16).requires_grad_()).sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("prompted", [False, True])
@pytest.mark.parametrize("change", [subclassed, patched, hooked])
def test_a_changed_projection_is_never_bypassed(change: Any, prompted: bool) -> None:
    vit, images = random_vit(), torch.randn(2, 3, 16, 16)
    prompt = torch.randn(vit.config.depth, 2, vit.config.dim) if prompted else None
    plain = vit(images, prompt)
    change(vit.blocks[-1].attn.qkv)
    expected = all_tokens(vit, images, prompt)[:, 0]
    torch.testing.assert_close(vit(images, prompt), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(vit(images, prompt), plain, atol=1e-2)
