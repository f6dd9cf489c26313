"""ESN: classifiers, energies and votes against loops; the anchor makes up for a planted difference."""

import math
from collections import Counter

import pytest
import torch

from protosteer.data.images import ArrayImages
from protosteer.evaluation.embedding_cache import EmbeddingCache
from protosteer.methods import esn
from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.esn import ESN, TEMPERATURES, Classifier, elect, energy
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images, toy_task

pytestmark = pytest.mark.slow

MAKE = Maker(ESN, make_images=EmbeddingCache)


def energy_by_hand(logits, temperature):
    """Of one image's logits, in double precision; the largest comes out of the sum lest it overflow."""
    top = max(logits) / temperature
    return -temperature * (top + math.log(sum(math.exp(z / temperature - top) for z in logits)))


def test_energy_and_votes_are_those_of_a_loop():
    torch.manual_seed(0)
    logits = [4 * torch.randn(200, k) for k in (2, 3, 1)]
    temperatures = [0.001, 0.5, 5.0, 50.0]
    split = 0
    for i in range(200):
        votes = []
        for t in temperatures:
            each = [energy_by_hand(z[i].tolist(), t) for z in logits]
            for z, expected in zip(logits, each, strict=True):
                assert math.isclose(float(energy(z, t)[i]), expected, rel_tol=1e-4, abs_tol=1e-3)
            votes.append(each.index(min(each)))
        count = Counter(votes)
        split += len(count) > 1
        most = max(count.values())
        assert int(elect(logits, temperatures)[i]) == min(t for t in count if count[t] == most)
    assert split > 20


def test_a_classifier_is_class_attention_by_a_token_of_its_own():
    torch.manual_seed(1)
    classifier, tokens = Classifier(toy_backbone(), 3), torch.randn(2, 7, 24)
    layer, heads = classifier.layer, 3
    for i in range(2):
        x = torch.cat([classifier.token[0], tokens[i]])  # [8, 24]
        read = layer.norm1(x)
        q, k, v = (read @ layer.attn.qkv.weight.T + layer.attn.qkv.bias).split(24, dim=1)
        parts = []
        for h in range(heads):
            some = slice(8 * h, 8 * h + 8)
            weights = (k[:, some] @ q[0, some] / math.sqrt(8)).softmax(dim=0)
            parts.append(weights @ v[:, some])
        own = x[0] + layer.attn.proj(torch.cat(parts))
        own = own + layer.mlp(layer.norm2(own))
        torch.testing.assert_close(classifier(tokens)[i], classifier.head(own), rtol=1e-4, atol=1e-5)


def test_the_least_energy_answers_with_its_own_class():
    method = MAKE.after()
    draw = torch.Generator().manual_seed(3)
    everything = [name for group in GROUPS for name in group]
    odd = torch.randint(0, 256, (60, 3, 16, 16), generator=draw).byte()
    pixels = torch.cat([toy_images(everything, per_class=5, seed=90)[0], odd])
    answer = method.answer(EmbeddingCache(method, ArrayImages(pixels)))
    tokens = method.backbone.embed_set(ArrayImages(pixels), method.prompt, whole=True)
    logits = [classifier(tokens) for classifier in method.classifiers]
    chosen = elect(logits, sorted(set(method.temperatures.tolist()))).tolist()
    for i, t in enumerate(chosen):
        assert int(answer.classes[i]) == [0, 2, 5][t] + int(logits[t][i].argmax())
        assert answer.candidates[i].tolist() == [s == t for s in range(3)]
        assert abs(float(answer.confidence[i]) - float(logits[t][i].softmax(dim=0).max())) < 1e-4
    assert set(chosen) == {0, 1, 2} and not answer.prompts.any()


def test_a_task_finds_the_temperature_at_which_it_knows_its_own_images():
    """Three logits of about 4.8 have less energy than one of 5 from a temperature of about 0.18 on."""
    method, biases = MAKE.after(2), ([5.0, -5.0], [4.8, 4.8, 4.8])
    assert method.temperatures[0] == torch.tensor(0.001)  # alone, it knows all of them at any
    for classifier, bias in zip(method.classifiers, biases, strict=True):
        classifier.head.weight *= 0.02
        classifier.head.bias.copy_(torch.tensor(bias))
    tokens = method.backbone.embed_set(ArrayImages(toy_images(GROUPS[1])[0]), method.prompt, whole=True)
    first, second = (classifier(tokens).tolist() for classifier in method.classifiers)
    known = []
    for t in TEMPERATURES:
        pairs = zip(first, second, strict=True)
        known.append(sum(energy_by_hand(b, t) < energy_by_hand(a, t) for a, b in pairs))
    expected = TEMPERATURES[known.index(max(known))]
    assert known[0] < max(known) and expected > 0.001, known
    assert method.find_temperature(toy_task(GROUPS[1])) == torch.tensor(expected)


@pytest.mark.parametrize("anchor_kind", ["authors", "energy"])
@pytest.mark.parametrize(("weight", "least", "most"), [(0.1, 0, 3), (0.0, 20, math.inf)])
def test_the_anchor_makes_up_for_a_planted_difference(weight, least, most, anchor_kind, monkeypatch):
    """A head that begins 30 above ends at the same energy as another with the anchor, far away without."""

    class Loud(Classifier):
        def __init__(self, backbone, classes, generator):
            super().__init__(backbone, classes, generator)
            self.head.bias.data += 30

    means = []
    for kind in (Classifier, Loud):
        monkeypatch.setattr(esn, "Classifier", kind)
        method = Maker(
            ESN, {"anchor": -10.0, "anchor_weight": weight, "gradient_clip": 5.0, "anchor_kind": anchor_kind}
        )()
        learn_task(method, GROUPS[1])
        tokens = method.backbone.embed_set(ArrayImages(toy_images(GROUPS[1])[0]), method.prompt, whole=True)
        logits = method.classifiers[0](tokens)
        means.append(float(energy(logits if anchor_kind == "energy" else -logits).mean()))
    assert least <= abs(means[0] - means[1]) <= most, means


def test_the_prompt_is_the_first_tasks_and_stays():
    first, last = MAKE.after(1), MAKE.after()
    assert torch.equal(first.prompt, last.prompt) and first.prompt.shape == (1, 2, 24)
    for name, tensor in first.classifiers.state_dict().items():
        assert torch.equal(tensor, last.classifiers.state_dict()[name])
