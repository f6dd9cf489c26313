"""Pre-training of mini and nano: a killed run ends bit-identical, and two runs of a recipe write the same file."""

import pickle
import sys
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import mini_assistant
import mini_data
import mini_glyphs
import mini_teacher
import mini_training
import pretrain_mini
import pretrain_nano
from protosteer.backbones import Backbone
from protosteer.paper.vit import ViT, ViTConfig

pytestmark = pytest.mark.slow

DIM = 192  # of the targets of glyphs, and so of every teacher
PHOTOS = 20


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    class NoValidation:
        def __init__(self, *datasets):
            pass

        def scores(self, backbone):
            return {}

    monkeypatch.setattr(mini_training, "Validation", NoValidation)
    monkeypatch.setattr(mini_glyphs, "SAMPLE", 400)
    for module in (mini_assistant, pretrain_mini):
        monkeypatch.setattr(module, "SAMPLE", PHOTOS)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A teacher of two layers and four patches."""
    file = tmp_path_factory.mktemp("teacher") / "deit_teacher.safetensors"
    vit = ViT(ViTConfig(image_size=32, patch_size=16, dim=DIM, depth=2, heads=3, mlp_dim=32))
    random = gen()
    save_file({name: 0.1 * torch.randn(v.shape, generator=random) for name, v in vit.state_dict().items()}, file)
    return mini_teacher.load_teacher(file)


@pytest.fixture
def assistant(teacher):
    how = replace(teacher.preprocessing, image_size=mini_data.SIZE)
    return Backbone("mini", mini_assistant.fold(teacher.vit).requires_grad_(False), how)


@pytest.fixture
def folder(tmp_path):
    pixels = torch.randint(0, 256, (PHOTOS, 3, mini_data.STORED, mini_data.STORED), generator=gen(), dtype=torch.uint8)
    np.save(tmp_path / mini_data.PHOTOS, pixels.numpy())
    return tmp_path


def test_crops_lie_inside_and_depend_on_row_and_view_alone():
    boxes = mini_data.crops(torch.arange(50), 2)
    side, centre = boxes[:, :1], boxes[:, 1:]
    assert (side**2 >= mini_data.SMALLEST_CROP - 1e-6).all() and (side <= 1).all()
    assert (centre.abs() + side <= 1 + 1e-6).all()
    assert torch.equal(mini_data.crops(torch.tensor([7, 3]), 2), boxes[[7, 3]])
    assert not torch.equal(mini_data.crops(torch.arange(50), 1), boxes)


def test_a_teacher_resumes_bit_identical(folder, teacher, monkeypatch):
    monkeypatch.setattr(mini_teacher, "FLUSH", 1)
    mini_teacher.compute_outputs(teacher, folder, 1, rows=mini_teacher.BATCH)
    assert mini_teacher.TeacherOutputs(folder, 1).count == mini_teacher.BATCH
    mini_teacher.compute_outputs(teacher, folder, 1)
    resumed = [np.array(array) for array in mini_teacher.TeacherOutputs(folder, 1).read()]
    (folder / "view1.count").unlink()
    mini_teacher.compute_outputs(teacher, folder, 1)
    for before, after in zip(resumed, mini_teacher.TeacherOutputs(folder, 1).read(), strict=True):
        assert np.array_equal(before, after) and np.abs(after).sum(axis=-1).min() > 0


def assistant_run(folder, teacher, assistant):
    recipe = mini_assistant.AssistantRecipe(batch_photos=4, batch_glyphs=2)
    for view in range(2):
        mini_teacher.compute_outputs(teacher, folder, view)
    vit, how = mini_assistant.fold(teacher.vit), assistant.preprocessing
    glyphs = mini_glyphs.Glyphs(vit, how, gen())
    loss = mini_assistant.FromTeacher(mini_assistant.Batches(folder, recipe), glyphs)
    # 72 images: two sweeps of five batches in file order, and two batches of a shuffled one.
    return mini_training.Training(vit, how, recipe), loss, 72


def mini_run(folder, teacher, assistant):
    recipe = pretrain_mini.MiniRecipe(batch_photos=3, batch_glyphs=2)
    vit = pretrain_mini.drawn_weights(assistant.vit.config, gen())
    loss = pretrain_mini.FromAssistant(assistant, pretrain_mini.Batches(folder, recipe), recipe)
    return mini_training.Training(vit, assistant.preprocessing, recipe), loss, 30


@pytest.mark.parametrize(("make", "last_step"), [(assistant_run, 7), (mini_run, 4)])
def test_a_killed_training_ends_bit_identical(folder, teacher, assistant, make, last_step):
    def trained(name, stop_after=None):
        """Train in such small steps that a checkpoint follows each; kill the training after some."""
        training, loss, images = make(folder, teacher, assistant)
        learn, steps = training.learn, iter(range(10**6))

        def learn_or_die(*args):
            if next(steps) == stop_after:
                raise KeyboardInterrupt
            return learn(*args)

        training.learn = learn_or_die
        args = Namespace(run=folder / name, images=images, every=0, cifar=None, mnist=None, folders=[], export=None)
        mini_training.train(training, loss, args)
        return training

    whole = trained("whole")
    with pytest.raises(KeyboardInterrupt):
        trained("killed", last_step)
    resumed = trained("killed")
    for one, other in ((whole.vit, resumed.vit), (whole.mean, resumed.mean)):
        for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b), name
    if make is not mini_run:
        return
    mini_training.export(resumed, folder / "mini.safetensors")
    loaded = Backbone.load("mini", weights=folder / "mini.safetensors")
    assert loaded.vit.config == resumed.vit.config and loaded.preprocessing == resumed.preprocessing
    assert torch.equal(loaded.vit.cls_token, resumed.mean.cls_token.half().float())


def test_a_checkpoint_of_another_recipe_is_rejected(folder, assistant):
    recipes = [pretrain_mini.MiniRecipe(rate=rate) for rate in (1e-3, 2e-3)]
    one, other = (mini_training.Training(assistant.vit, assistant.preprocessing, recipe) for recipe in recipes)
    one.save(folder / mini_training.CHECKPOINT)
    with pytest.raises(SystemExit, match="another recipe"):
        other.restore(folder / mini_training.CHECKPOINT)
    one.processes = 2
    with pytest.raises(SystemExit, match="2 processes"):
        mini_training.train(one, None, Namespace(run=folder / "new", export=None))


def test_nano_is_deterministic_and_loads(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).integers(0, 256, (40, 3072), dtype=np.uint8)
    table = {"data": rows, "fine_labels": [i % 10 for i in range(40)]}
    for split in ("train", "test"):
        (tmp_path / split).write_bytes(pickle.dumps(table, protocol=2))
    (tmp_path / "meta").write_bytes(pickle.dumps({"fine_label_names": ["x"] * 100}, protocol=2))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    weights = []
    for path in (tmp_path / "one.safetensors", tmp_path / "two.safetensors"):
        words = f"--recipe procedural --steps 3 --batch 8 --cifar {tmp_path} --out {path}"
        monkeypatch.setattr(sys, "argv", ["pretrain_nano.py", *words.split()])
        pretrain_nano.main()
        weights.append(path.read_bytes())
    assert weights[0] == weights[1] and len(weights[0]) <= 4_000_000
    assert Backbone.load("nano", weights=path).vit.config == pretrain_nano.NANO == Backbone.load("nano").vit.config
