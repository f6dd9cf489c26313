"""DualPrompt's matching, the places of its prefixes, and its pull term, against what is written out by hand."""

import math

import pytest
import torch

from protosteer.backbones import Backbone
from protosteer.data.transforms import Preprocessing
from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.dualprompt import DualPrompt
from protosteer.methods.prefix_vit import Prefix
from protosteer.methods.testing import GROUPS, toy_images
from protosteer.paper.vit import ViT, ViTConfig


@pytest.fixture(scope="module")
def method() -> DualPrompt:
    method = Maker(DualPrompt).after()
    assert isinstance(method, DualPrompt)
    draw = torch.Generator().manual_seed(1)  # keys so different that images of one task differ in their match
    method.past["keys"] = torch.randn(3, 24, generator=draw)
    return method


def images(method: DualPrompt) -> torch.Tensor:
    return method.backbone.preprocessing(toy_images(GROUPS[1], per_class=3)[0], method.backbone.device)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    dot = sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))
    return dot / math.sqrt(sum(x * x for x in a.tolist()) * sum(y * y for y in b.tolist()))


def test_every_image_gets_the_expert_prompt_of_its_nearest_key(method):
    """Alone, under a prefix built by hand: the general one in layer 1, the expert one in layer 2."""
    some = images(method)
    queries = method.backbone.embed(some)
    found = method.features(method.backbone, some, method.prompt(queries))
    matches = []
    for image, query, feature in zip(some, queries, found, strict=True):
        cosines = [cosine(query, key) for key in method.past["keys"]]
        task = cosines.index(max(cosines))
        matches.append(task)
        prefix = Prefix((method.shared["general"][:1], method.past["experts"][task]))
        torch.testing.assert_close(feature, method.backbone.embed(image[None], prefix)[0])
    assert len(set(matches)) > 1
    assert method.candidates(queries).tolist() == [[t == task for t in range(3)] for task in matches]


def test_a_task_is_learned_under_its_own_prompt_and_pulls_its_key(method):
    some = images(method)
    queries = method.backbone.embed(some)
    learning = Maker(DualPrompt, {"pull": 0.3}).after(1)
    learning.current = {n: torch.nn.Parameter(t) for n, t in learning.new_task_parameters().items()}
    prompt, penalty = learning.training_prompt(queries)
    general, expert = prompt.layers
    assert torch.equal(general[0], learning.shared["general"][0])
    assert torch.equal(expert[0], learning.current["experts"][0])
    expected = sum(1 - cosine(query, learning.current["keys"]) for query in queries) / len(queries)
    assert penalty.item() == pytest.approx(0.3 * expected, rel=1e-5)


def test_an_expert_prompt_starts_as_the_one_before_it_and_then_leaves_it_alone():
    method = Maker(DualPrompt).after(1)
    assert torch.equal(method.new_task_parameters()["experts"], method.past["experts"][0])
    before = {name: tensor.clone() for name, tensor in method.past.items()}
    general = method.shared["general"].detach().clone()
    learn_task(method, GROUPS[1])
    for name, tensor in method.past.items():
        assert torch.equal(tensor[:1], before[name]) and not torch.equal(tensor[1], tensor[0])
    assert not torch.equal(method.shared["general"], general)


@pytest.mark.parametrize(
    ("depth", "general", "expert"), [(1, 0, 1), (2, 1, 1), (3, 2, 1), (4, 2, 2), (5, 2, 3), (7, 2, 3)]
)
def test_layers_follow_the_depth_of_the_backbone(depth, general, expert):
    """The published ones where they exist; lengths count keys and values together."""
    config = ViTConfig(image_size=16, patch_size=8, dim=24, depth=depth, heads=3, mlp_dim=48)
    half = (0.5, 0.5, 0.5)
    method = DualPrompt(Backbone("toy", ViT(config), Preprocessing(16, half, half)), DualPrompt.settings_from({}))
    assert method.new_shared()["general"].shape == (general, 2, 3, 24)
    assert method.new_task_parameters()["experts"].shape == (expert, 2, 10, 24)
    method.shared, experts = (method._parameters(method.new_shared()), method.new_task_parameters()["experts"][None])
    assert [t.shape[2] for t in method._prefix(experts).layers] == [3] * general + [10] * expert
    assert method.backbone.embed(torch.zeros(2, 3, 16, 16), method._prefix(experts)).shape == (2, 24)
    method.settings = method.settings.replace(length="both")
    assert method.new_shared()["general"].shape == (general, 2, 5, 24)
