"""InfLoRA: directions and protected subspaces against numpy, updates against their merged weights."""

import math

import numpy as np
import torch
from torch import nn

from protosteer.data.images import ArrayImages
from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.inflora import InfLoRA, LowRankQKV, protect
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images, toy_task


def test_a_low_rank_update_is_that_of_the_merged_weights():
    torch.manual_seed(0)
    plain, x = nn.Linear(6, 18), torch.randn(2, 5, 6)
    changed = LowRankQKV(plain, torch.randn(2, 6))
    assert torch.equal(changed(x), plain(x))
    nn.init.normal_(changed.up)
    expected = plain(x)
    expected[..., 6:] += x @ (changed.up @ changed.down).T
    torch.testing.assert_close(changed(x), expected)
    torch.testing.assert_close(changed.to_plain()(x), expected)


def test_grams_are_those_of_all_tokens_before_attention():
    method = Maker(InfLoRA).after(1)
    found = method.input_grams(toy_task(GROUPS[1]))
    vit, pixels = method.backbone.vit, toy_images(GROUPS[1])[0]
    x = vit.embed_patches(method.backbone.preprocessing(pixels))
    for block, gram in zip(vit.blocks, found, strict=True):
        rows = block.norm1(x).flatten(0, 1).double().numpy()
        np.testing.assert_allclose(gram.numpy(), rows.T @ rows / len(rows), rtol=1e-5, atol=1e-7)
        x = block(x)


def test_what_is_protected_keeps_its_share_of_the_energy():
    """As the authors' lists of basis vectors grow, with numpy."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(40, 8, generator=draw, dtype=torch.float64) * torch.logspace(0, -2, 8) for _ in range(3)]
    rows[1] = rows[1].roll(3, dims=1)
    projection, basis = torch.zeros(8, 8, dtype=torch.float64), np.zeros((8, 0))
    for task, share in enumerate((0.9, 0.93, 0.96)):
        gram = (rows[task].T @ rows[task]).numpy()
        total = (np.linalg.svd(gram)[1] ** 2).sum()
        left, values, _ = np.linalg.svd(gram - basis @ basis.T @ gram)
        kept, count = 1 - (values**2).sum() / total, 0
        if task == 0:
            count = max(1, int((np.cumsum(values**2 / total) < share).sum()))
        else:
            while kept < share:
                kept += values[count] ** 2 / total
                count += 1
        basis = np.hstack([basis, left[:, :count]])
        projection = protect(torch.from_numpy(gram), projection, share)
        np.testing.assert_allclose(projection.numpy(), basis @ basis.T, atol=1e-9)
    assert 2 <= basis.shape[1] < 8


def test_a_task_changes_nothing_in_protected_directions():
    make = Maker(InfLoRA)
    before, after = make.after(1), make.after(2)
    for old, new, projection in zip(before.attention, after.attention, before.projections, strict=True):
        moved = (new.weight - old.weight).double()
        assert torch.equal(moved[:24], torch.zeros(24, 24)), "queries stay"
        assert float(moved.norm()) > 1e-3 and float((moved @ projection).norm()) < 1e-5 * float(moved.norm())
        assert 0 < int(torch.linalg.matrix_rank(moved, rtol=1e-5)) <= 6


def test_directions_are_those_of_the_first_tasks_inputs():
    method = Maker(InfLoRA)()
    task = toy_task(GROUPS[0])
    grams = method.input_grams(task)
    method.begin_task(task, torch.zeros(16, dtype=torch.long))
    for qkv, gram in zip(method.attention, grams, strict=True):
        values, vectors = np.linalg.eigh(gram.numpy())
        expected = vectors[:, ::-1][:, :6].T / math.sqrt(3)
        signs = np.sign((expected * qkv.down.numpy()).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(qkv.down.numpy(), signs * expected, atol=1e-4)


def test_the_last_layer_is_trained_too():
    """Its projection is a subclass of nn.Linear, which attention must not slice."""
    method, backbone = Maker(InfLoRA)(), toy_backbone()
    learn_task(method, GROUPS[0])
    last = method.attention[-1].weight - backbone.vit.blocks[-1].attn.qkv.weight
    assert float(last.abs().max()) > 1e-4
    pixels = ArrayImages(toy_images(GROUPS[0])[0])
    assert not torch.allclose(method.backbone.embed_set(pixels), backbone.embed_set(pixels), atol=1e-3)
