"""Joint training is one training on all images, whatever the sequence in which they came."""

import pytest
import torch

from protosteer.methods.checks import Maker, learn_task
from protosteer.methods.finetune import Finetune
from protosteer.methods.joint import Joint
from protosteer.methods.testing import GROUPS, toy_images

pytestmark = pytest.mark.slow

ALL = [name for group in GROUPS for name in group]


def test_every_image_is_kept_with_its_label():
    method = Maker(Joint).after()
    pixels = torch.cat([toy_images(group)[0] for group in GROUPS])
    labels = [method.classes.index(label) for group in GROUPS for label in toy_images(group)[1]]
    assert torch.equal(method.buffer.pixels, pixels) and method.buffer.labels.tolist() == labels


def test_of_a_single_task_it_is_fine_tuning():
    joint, plain = (Maker(method, {**Joint.test_settings, "schedule": "cosine"})() for method in (Joint, Finetune))
    for method in (joint, plain):
        learn_task(method, ALL)
    assert all(torch.equal(p, plain.parameters()[name]) for name, p in joint.parameters().items())
