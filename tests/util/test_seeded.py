"""Modules initialised by a generator: torch's bits, without torch's generator."""

import torch
from torch import nn

from protosteer.paper.vit import Block, ViTConfig
from protosteer.util.seeded import seeded

CONFIG = ViTConfig(image_size=16, patch_size=8, dim=24, depth=1, heads=3, mlp_dim=48)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False), Block(CONFIG))


def test_a_generator_gives_the_bits_of_torchs_own():
    torch.manual_seed(3)
    expected, state = layers(), torch.get_rng_state()
    generator = torch.Generator().manual_seed(3)
    found = seeded(layers, generator)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(generator.get_state(), state)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    torch.manual_seed(3)
    assert torch.equal(seeded(layers, None)[0].weight, expected[0].weight)
