"""LayUP: tokens of layers against hooks, the streaming ridge and its folds against solving everything at once."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import Ridge
from sklearn.model_selection import StratifiedKFold

from protosteer.evaluation.embedding_cache import EmbeddingCache
from protosteer.methods.checks import Maker
from protosteer.methods.layer_tokens import LayerTokens
from protosteer.methods.layup import LAMBDAS, LayUP, stratified_folds
from protosteer.methods.ridge import fold_accuracy
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images


def hooked(backbone, pixels, prompt=None):
    """What each layer returned for the pooled tokens, [N, depth, D], by hooks on a forward that computes all tokens."""
    found = []
    hooks = [b.register_forward_hook(lambda _m, _i, out: found.append(out)) for b in backbone.vit.blocks]
    backbone.tokens(backbone.preprocessing(pixels), prompt)
    for hook in hooks:
        hook.remove()
    pooled = backbone.vit.config.pool == "token"
    return torch.stack([x[:, 0] if pooled else x[:, -backbone.vit.config.patches :].mean(dim=1) for x in found], dim=1)


@pytest.mark.parametrize("pool", ["token", "mean"])
@pytest.mark.parametrize("prompted", [False, True])
def test_tokens_are_those_that_layers_return(pool, prompted):
    backbone, pixels = toy_backbone(pool=pool), toy_images(GROUPS[0])[0]
    prompt = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(0)) if prompted else None
    expected = hooked(backbone, pixels, prompt)
    for layers in (1, 2):
        found = backbone.embed_pixels(pixels, LayerTokens(layers, prompt))
        torch.testing.assert_close(found, expected[:, -layers:].flatten(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_task_by_task_equals_scikit_learns_ridge_of_all_images(layer_norm, monkeypatch):
    monkeypatch.setattr("protosteer.methods.layup.LAMBDAS", (0.5,))
    method = Maker(LayUP, {"layer_norm": layer_norm, "first_session": "none"}).after()
    pixels = torch.cat([toy_images(group)[0] for group in GROUPS])
    labels = torch.tensor([method.classes.index(name) for group in GROUPS for name in toy_images(group)[1]])
    tokens = hooked(toy_backbone(), pixels)
    hidden = (F.layer_norm(tokens, (24,)) if layer_norm else tokens).flatten(1).double()
    oracle = Ridge(alpha=0.5, fit_intercept=False).fit(hidden.numpy(), F.one_hot(labels).numpy())
    expected = torch.from_numpy(oracle.predict(hidden.numpy()))
    torch.testing.assert_close(hidden @ method.weights.double(), expected, rtol=0, atol=1e-4)


def test_folds_are_stratified_blocks():
    labels = torch.arange(3).repeat_interleave(8)[torch.randperm(24, generator=torch.Generator().manual_seed(1))]
    folds = stratified_folds(labels)
    splits = StratifiedKFold(4).split(torch.zeros(24), labels)
    assert [(folds == i).nonzero()[:, 0].tolist() for i in range(4)] == [held_out.tolist() for _, held_out in splits]
    assert stratified_folds(torch.zeros(2, dtype=torch.long)).tolist() == [0, 2]


@pytest.mark.parametrize("features", [5, 60])  # fewer and more than there are images
def test_accuracy_of_folds_is_that_of_solving_each(features):
    draw = torch.Generator().manual_seed(0)
    earlier, hidden = (torch.randn(16, features, generator=draw, dtype=torch.float64) for _ in range(2))
    past, labels = F.one_hot(torch.arange(16) % 2, 4).double(), 2 + torch.arange(16) % 2
    hidden[labels == 3] += 0.7
    targets, folds = F.one_hot(labels, 4).double(), stratified_folds(labels)
    found = fold_accuracy(hidden, targets, earlier, earlier.T @ past, folds, LAMBDAS)
    for ridge, accuracy in zip(LAMBDAS, found, strict=True):
        if ridge < 1e-5 and features > 32:
            continue  # singular for a plain solver
        hits = []
        for fold in range(4):
            rows, wanted = torch.cat([earlier, hidden[folds != fold]]), torch.cat([past, targets[folds != fold]])
            weights = torch.linalg.solve(rows.T @ rows + ridge * torch.eye(features), rows.T @ wanted)
            hits.append(((hidden[folds == fold] @ weights).argmax(dim=1) == labels[folds == fold]).double().mean())
        assert float(accuracy) == pytest.approx(float(torch.stack(hits).mean()))


def test_several_layers_are_cached_like_embeddings():
    make = Maker(LayUP, {"first_session": "none"}, EmbeddingCache)
    method = make.after()
    images = make.images(method, GROUPS[1])
    first, passes = method.predict(images), images.forward_passes
    assert torch.equal(method.predict(images), first) and images.forward_passes == passes == len(images)
