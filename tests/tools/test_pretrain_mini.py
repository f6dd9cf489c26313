"""mini's recipe on drawn data: its parts in closed form, and that nothing is lost when it is killed."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import mini_data
import mini_student
import mini_teacher
import mini_validation
import pretrain_mini
from protosteer.backbones import Backbone
from protosteer.method.vit import ViT, ViTConfig

DIM = 192  # of glyphs' targets, and so of every teacher
PHOTOS = 20


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(mini_student, "SAMPLE", 400)
    monkeypatch.setattr(pretrain_mini, "SAMPLE", PHOTOS)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A teacher of two layers and four patches, with a head of five labels."""
    file = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    vit = ViT(ViTConfig(image_size=32, patch_size=16, dim=DIM, depth=2, heads=3, mlp_dim=32))
    random = gen()
    state = {
        name: 0.1 * torch.randn(value.shape, generator=random) for name, value in vit.state_dict().items()
    }
    head = {"head.weight": torch.randn(5, DIM, generator=random), "head.bias": torch.zeros(5)}
    save_file(state | head, file)
    return file


@pytest.fixture(scope="module")
def teacher(weights):
    return mini_teacher.load_teacher(weights)


@pytest.fixture
def folder(tmp_path):
    pixels = torch.randint(0, 256, (PHOTOS, 3, 64, 64), generator=gen(), dtype=torch.uint8)
    np.save(tmp_path / mini_data.PHOTOS, pixels.numpy())
    return tmp_path


def test_a_folded_kernel_gives_what_the_kernel_gives_for_the_patch_enlarged():
    kernel, patch = torch.randn(4, 3, 16, 16, generator=gen()), torch.randn(1, 3, 8, 8, generator=gen(1))
    enlarged = F.interpolate(patch, size=(16, 16), mode="bicubic")
    folded = mini_student.fold_kernel(kernel)
    torch.testing.assert_close(F.conv2d(patch, folded), F.conv2d(enlarged, kernel), rtol=1e-4, atol=1e-4)


def test_a_student_has_the_layers_that_were_taken(teacher):
    student = mini_student.fold(teacher.vit, [1])
    assert student.config.depth == 1 and student.config.grid == 8
    for name, value in teacher.vit.blocks[1].state_dict().items():
        assert torch.equal(student.blocks[0].state_dict()[name], value)


def test_losses_are_those_of_a_loop():
    random = gen()
    tokens, classes, patches = (
        torch.randn(*shape, generator=random) for shape in ((5, 4, 6), (3, 6), (3, 3, 6))
    )
    glyphs, head, bias = (torch.randn(*shape, generator=random) for shape in ((2, 6), (7, 6), (7,)))
    spread = torch.rand(2, 6, generator=random) + 0.5
    scales = mini_student.Scales(spread[0], spread[1], head, bias)
    token = label = patch = glyph = 0.0
    for i in range(3):
        token += sum(float((tokens[i, 0, d] - classes[i, d]) ** 2 / spread[0, d]) for d in range(6)) / 18
        read, truth = ((head @ x + bias).softmax(dim=0) for x in (tokens[i, 0], classes[i]))
        label += float(sum(t * (t.log() - r.log()) for t, r in zip(truth, read, strict=True))) / 3
        for p in range(3):
            patch += float(((tokens[i, 1 + p] - patches[i, p]) ** 2 / spread[1]).sum()) / 54
    for i in range(2):
        a, b = tokens[3 + i, 0], glyphs[i]
        glyph += (1 - float(a @ b / (a.norm() * b.norm()))) / 2
    found = mini_student.losses(tokens, classes, patches, glyphs, scales)
    assert {name: float(part) for name, part in found.items()} == pytest.approx(
        {"tokens": token, "labels": label, "patches": patch, "glyphs": glyph}, rel=1e-4
    )


def test_targets_of_glyphs_are_unit_vectors_turned_towards_the_student(teacher):
    student = mini_student.fold(teacher.vit, [0, 1])
    glyphs = mini_student.Glyphs(student, teacher.preprocessing, gen())
    drawn = mini_student.random_glyphs(6, gen(1))
    torch.testing.assert_close(glyphs.target(drawn).norm(dim=1), torch.ones(6))
    torch.testing.assert_close(glyphs.turn @ glyphs.turn.T, torch.eye(DIM), rtol=0, atol=1e-4)


def test_crops_lie_inside_and_depend_on_row_and_view_alone():
    boxes = mini_data.crops(torch.arange(50), 2)
    side, centre = boxes[:, :1], boxes[:, 1:]
    assert (side**2 >= mini_data.SMALLEST_CROP - 1e-6).all() and (side <= 1).all()
    assert (centre.abs() + side <= 1 + 1e-6).all()
    assert torch.equal(mini_data.crops(torch.tensor([7, 3]), 2), boxes[[7, 3]])
    assert not torch.equal(mini_data.crops(torch.arange(50), 1), boxes)


def test_what_is_cut_is_what_lies_in_the_box():
    pixels = torch.randint(0, 256, (2, 3, 64, 64), generator=gen(), dtype=torch.uint8)
    assert torch.equal(mini_data.cut(pixels, mini_data.crops(torch.arange(2), 0)), pixels)
    lower_left = torch.tensor([[0.5, -0.5, 0.5]]).repeat(2, 1)
    expected = F.interpolate(pixels[:, :, 32:, :32].float(), size=64, mode="bicubic").round().clamp(0, 255)
    inner = (..., slice(8, 56), slice(8, 56))  # near its border a crop sees its neighbours
    difference = mini_data.cut(pixels, lower_left)[inner].float() - expected[inner]
    assert difference.abs().max() <= 1


def test_a_teacher_that_was_stopped_goes_on_with_the_same_bits(folder, teacher, monkeypatch):
    monkeypatch.setattr(mini_teacher, "FLUSH", 1)
    mini_teacher.teach(teacher, folder, 1, batches=1)
    assert mini_teacher.Lessons(folder, 1).count == mini_teacher.BATCH
    mini_teacher.teach(teacher, folder, 1)
    stopped = [np.array(array) for array in mini_teacher.Lessons(folder, 1).read()]
    (folder / "view1.count").unlink()
    mini_teacher.teach(teacher, folder, 1)
    for before, after in zip(stopped, mini_teacher.Lessons(folder, 1).read(), strict=True):
        assert np.array_equal(before, after) and np.abs(after).sum(axis=-1).min() > 0


def test_the_teacher_sees_what_the_backbone_embeds(folder, teacher):
    pixels = torch.from_numpy(np.load(folder / mini_data.PHOTOS)[:4])
    classes, patches = mini_teacher.look(teacher, pixels)
    torch.testing.assert_close(classes.float(), teacher.embed_pixels(pixels), rtol=0.02, atol=0.02)
    tokens = teacher.tokens(teacher.preprocessing(pixels))[:, 1:]
    corners = patches.unflatten(1, (8, 8))[:, ::7, ::7].flatten(
        1, 2
    )  # where one of its four patches is alone
    torch.testing.assert_close(corners.float(), tokens, rtol=0.02, atol=0.02)


def trained(folder, weights, run, images, stop_after=None):
    """A run in so small steps that a checkpoint follows each; perhaps killed."""
    recipe = pretrain_mini.Recipe(layers="0,1", views=2, batch_photos=4, batch_glyphs=2, labels_weight=1.0)
    teacher = mini_teacher.load_teacher(weights)
    training = pretrain_mini.Training(recipe, teacher)
    if (run / pretrain_mini.CHECKPOINT).exists():
        training.restore(run / pretrain_mini.CHECKPOINT)
    run.mkdir(exist_ok=True)
    course = pretrain_mini.Course(folder, recipe)
    learn, steps = training.learn, iter(range(10**6))

    def killed(*args):
        if next(steps) == stop_after:
            raise KeyboardInterrupt
        return learn(*args)

    training.learn = killed
    args = Namespace(run=run, images=images, minutes=0, cifar=None, mnist=None)
    pretrain_mini.go_on(training, course, pretrain_mini.teacher_scales(weights, course), args)
    return training


def test_a_training_that_was_killed_ends_with_the_same_bits(folder, weights, teacher, monkeypatch):
    class Nothing:
        def __init__(self, *sets):
            pass

        def scores(self, backbone):
            return {}

    monkeypatch.setattr(pretrain_mini, "Validation", Nothing)
    for view in range(2):
        mini_teacher.teach(teacher, folder, view)
    images = 6 * 12  # two sweeps of five batches in file order, and two batches of a shuffled one
    whole = trained(folder, weights, folder / "whole", images)
    with pytest.raises(KeyboardInterrupt):
        trained(folder, weights, folder / "killed", images, stop_after=7)
    again = trained(folder, weights, folder / "killed", images)
    for one, other in ((whole.vit, again.vit), (whole.mean, again.mean)):
        for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b), name
    pretrain_mini.export(again, folder / "mini.safetensors")
    loaded = Backbone.load("mini", weights=folder / "mini.safetensors")
    assert loaded.vit.config == again.vit.config and loaded.preprocessing == again.preprocessing
    assert torch.equal(loaded.vit.cls_token, again.mean.cls_token.half().float())


def test_a_run_of_another_recipe_is_refused(folder, teacher):
    training = pretrain_mini.Training(pretrain_mini.Recipe(layers="0"), teacher)
    training.save(folder / pretrain_mini.CHECKPOINT)
    other = pretrain_mini.Training(pretrain_mini.Recipe(layers="1"), teacher)
    with pytest.raises(SystemExit, match="another recipe"):
        other.restore(folder / pretrain_mini.CHECKPOINT)


def test_the_rate_rises_stays_and_falls():
    rates = [pretrain_mini.learning_rate(seen, 1000, 1.0) for seen in range(0, 1001, 25)]
    assert rates[0] == pytest.approx(0.02) and rates[2:31] == [1.0] * 29 and rates[-1] == 0
    assert rates[35] == pytest.approx(0.5)


def test_class_means_are_those_of_a_loop():
    points = torch.randn(4, 26, 3, generator=gen()) + torch.randn(4, 1, 3, generator=gen(1))
    means, right = points[:, : mini_validation.LEARNED].mean(dim=1), 0
    for c in range(4):
        for point in points[c, mini_validation.LEARNED :]:
            right += int(max(range(4), key=lambda k: float(F.cosine_similarity(point, means[k], dim=0)))) == c
    assert mini_validation.by_class_means(points) == pytest.approx(100 * right / 24)


def test_whitened_points_scatter_alike_in_all_directions(monkeypatch):
    monkeypatch.setattr(mini_validation, "SHRINKAGE", 0.0)
    points = torch.randn(50, 25, 3, generator=gen()) @ torch.randn(3, 3, generator=gen(1))
    learned = mini_validation.whitened(points)[:, : mini_validation.LEARNED]
    around = (learned - learned.mean(dim=1, keepdim=True)).flatten(0, 1)
    torch.testing.assert_close(around.T @ around / len(around), torch.eye(3), rtol=0, atol=1e-3)
