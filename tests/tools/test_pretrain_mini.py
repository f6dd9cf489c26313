"""mini's recipe on drawn data: its parts in closed form, and that nothing is lost when it is killed."""

from __future__ import annotations

import copy
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import mini_assistant
import mini_data
import mini_glyphs
import mini_teacher
import mini_training
import mini_validation
import pretrain_mini
from protosteer.backbones import Backbone
from protosteer.backbones.prompting import all_tokens
from protosteer.paper.vit import ViT, ViTConfig

pytestmark = pytest.mark.slow

DIM = 192  # of glyphs' targets, and so of every teacher
PHOTOS = 20


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(mini_glyphs, "SAMPLE", 400)
    for module in (mini_assistant, pretrain_mini):
        monkeypatch.setattr(module, "SAMPLE", PHOTOS)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A teacher of two layers and four patches."""
    file = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    vit = ViT(ViTConfig(image_size=32, patch_size=16, dim=DIM, depth=2, heads=3, mlp_dim=32))
    random = gen()
    state = {
        name: 0.1 * torch.randn(value.shape, generator=random) for name, value in vit.state_dict().items()
    }
    save_file(state, file)
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
    folded = mini_assistant.fold_kernel(kernel)
    torch.testing.assert_close(F.conv2d(patch, folded), F.conv2d(enlarged, kernel), rtol=1e-4, atol=1e-4)


def test_targets_of_glyphs_are_unit_vectors_turned_towards_the_student(teacher):
    glyphs = mini_glyphs.Glyphs(mini_assistant.fold(teacher.vit), teacher.preprocessing, gen())
    drawn = mini_glyphs.random_glyphs(6, gen(1))
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


def loop_apart(one, other, variances):
    """Squared distance of two lists of vectors, one number at a time."""
    found = [
        float((a - b) ** 2 / v)
        for x, y in zip(one, other, strict=True)
        for a, b, v in zip(x, y, variances, strict=True)
    ]
    return sum(found) / len(found)


def test_the_assistant_is_as_far_from_the_teacher_as_a_loop_says(folder, teacher):
    mini_teacher.teach(teacher, folder, 0)
    recipe = mini_assistant.AssistantRecipe(batch_photos=3, batch_glyphs=2, views=1)
    vit = mini_assistant.fold(teacher.vit)
    how = replace(teacher.preprocessing, image_size=64)
    course = mini_assistant.Course(folder, recipe)
    lesson = mini_assistant.FromTeacher(course, mini_glyphs.Glyphs(vit, how, gen()))
    pixels, classes, patches, drawn = course.draw(0)
    with torch.no_grad():
        photos = all_tokens(vit, how.normalise(pixels.float() / 255))
        strokes = all_tokens(vit, lesson.glyphs.shown(drawn))[:, 0]
        found = lesson.parts(vit, 0, 0.0)
    assert float(found["tokens"]) == pytest.approx(
        loop_apart(photos[:, 0], classes, lesson.variances[0]), rel=0.05
    )
    both = photos[:, 1:].flatten(0, 1), patches.flatten(0, 1)
    assert float(found["patches"]) == pytest.approx(loop_apart(*both, lesson.variances[1]) / 2, rel=0.05)
    cosines = [
        float(a @ b / (a.norm() * b.norm()))
        for a, b in zip(strokes, lesson.glyphs.target(drawn), strict=True)
    ]
    assert float(found["glyphs"]) == pytest.approx(1 - sum(cosines) / 2, rel=0.05)


def test_a_mirrored_photograph_has_mirrored_patches(folder, teacher):
    mini_teacher.teach(teacher, folder, 0)
    course = mini_assistant.Course(folder, mini_assistant.AssistantRecipe(batch_photos=PHOTOS, views=1))
    pixels, _, patches, _ = course.draw(0)
    originals = torch.from_numpy(np.load(folder / mini_data.PHOTOS))
    _, truth = (torch.from_numpy(np.array(array)).float() for array in mini_teacher.Lessons(folder, 0).read())
    kinds = set()
    for i in range(PHOTOS):
        same = torch.equal(pixels[i], originals[i])
        assert same or torch.equal(pixels[i], originals[i].flip(2))
        square = truth[i].unflatten(0, (8, 8))
        assert torch.equal(patches[i], (square if same else square.flip(1)).flatten(0, 1))
        kinds.add(same)
    assert kinds == {True, False}


@pytest.fixture
def assistant(teacher):
    how = replace(teacher.preprocessing, image_size=64)
    return Backbone("mini", mini_assistant.fold(teacher.vit).requires_grad_(False), how)


@pytest.mark.parametrize("done", [0.0, 0.9])
def test_one_that_says_the_same_is_nowhere_apart(folder, assistant, done):
    recipe = pretrain_mini.MiniRecipe(batch_photos=3, batch_glyphs=2)
    lesson = pretrain_mini.FromAssistant(assistant, pretrain_mini.Pictures(folder, recipe), recipe)
    same = lesson.parts(assistant.vit, 0, done)
    assert all(float(same[name]) == 0 for name in ("layers", "tokens", "patches"))
    assert float(same["glyphs"]) > 0


def test_a_layer_that_is_helped_does_not_suffer_from_those_before_it(assistant):
    broken = copy.deepcopy(assistant.vit)
    broken.blocks[0].mlp.fc2.bias += 1.0
    pictures = torch.randn(4, 3, 64, 64, generator=gen())
    said = pretrain_mini.after_layers(assistant.vit, pictures)
    alone, helped = (
        pretrain_mini.after_layers(broken, pictures),
        pretrain_mini.after_helped_layers(broken, pictures, said),
    )
    for found in (alone, helped):
        torch.testing.assert_close(found[0] - said[0], torch.ones_like(found[0]))
    assert torch.equal(helped[1], said[1])
    assert (alone[1] - said[1]).abs().mean() > 0.1
    torch.testing.assert_close(broken.norm(alone[-1]), all_tokens(broken, pictures))


def test_distances_of_layers_are_those_of_a_loop():
    one, other, sample = (torch.randn(3, 5, 4, generator=gen(seed)) for seed in range(3))
    variances = pretrain_mini.moments(sample)
    least = pretrain_mini.LEAST * variances[1]
    assert torch.equal(variances[0], torch.maximum(sample[:, 0].var(dim=0), least))
    squares = pretrain_mini.moments(sample, centred=False)[1]
    torch.testing.assert_close(squares, sample[:, 1:].flatten(0, 1).square().mean(dim=0))
    classes, patches = pretrain_mini.apart(one, other, variances)
    assert float(classes) == pytest.approx(loop_apart(one[:, 0], other[:, 0], variances[0]), rel=1e-4)
    both = one[:, 1:].flatten(0, 1), other[:, 1:].flatten(0, 1)
    assert float(patches) == pytest.approx(loop_apart(*both, variances[1]), rel=1e-4)


def test_drawn_weights_are_the_same_again_and_small_whatever_the_assistant_has(assistant):
    one, again = (pretrain_mini.drawn_weights(assistant.vit.config, gen()) for _ in range(2))
    for (name, a), b in zip(one.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b) and a.requires_grad, name
        if "norm" not in name and not name.endswith("bias"):
            assert float(a.detach().std()) == pytest.approx(0.02, rel=0.2), name


def trained(lesson, training, run, images, stop_after=None):
    """A run in so small steps that a checkpoint follows each; perhaps killed."""
    learn, steps = training.learn, iter(range(10**6))

    def killed(*args):
        if next(steps) == stop_after:
            raise KeyboardInterrupt
        return learn(*args)

    training.learn = killed
    args = Namespace(run=run, images=images, minutes=0, cifar=None, mnist=None, export=None)
    mini_training.train(training, lesson, args)
    return training


@pytest.fixture
def unjudged(monkeypatch):
    class Nothing:
        def __init__(self, *sets):
            pass

        def scores(self, backbone):
            return {}

    monkeypatch.setattr(mini_training, "Validation", Nothing)


def same_bits(one, other):
    for mine, theirs in ((one.vit, other.vit), (one.mean, other.mean)):
        for (name, a), b in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
            assert torch.equal(a, b), name


def test_an_assistant_that_was_killed_ends_with_the_same_bits(folder, teacher, unjudged):
    for view in range(2):
        mini_teacher.teach(teacher, folder, view)
    recipe = mini_assistant.AssistantRecipe(batch_photos=4, batch_glyphs=2)

    def run(name, **options):
        vit, how = mini_assistant.fold(teacher.vit), replace(teacher.preprocessing, image_size=64)
        course = mini_assistant.Course(folder, recipe)
        lesson = mini_assistant.FromTeacher(course, mini_glyphs.Glyphs(vit, how, gen()))
        images = 6 * 12  # two sweeps of five batches in file order, and two batches of a shuffled one
        return trained(lesson, mini_training.Training(vit, how, recipe), folder / name, images, **options)

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("killed", stop_after=7)
    same_bits(whole, run("killed"))


def test_a_mini_that_was_killed_ends_with_the_same_bits(folder, assistant, unjudged):
    recipe = pretrain_mini.MiniRecipe(batch_photos=3, batch_glyphs=2)

    def run(name, **options):
        vit = pretrain_mini.drawn_weights(assistant.vit.config, gen())
        lesson = pretrain_mini.FromAssistant(assistant, pretrain_mini.Pictures(folder, recipe), recipe)
        training = mini_training.Training(vit, assistant.preprocessing, recipe)
        return trained(lesson, training, folder / name, 5 * 6, **options)

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("killed", stop_after=4)
    again = run("killed")
    same_bits(whole, again)
    mini_training.export(again, folder / "mini.safetensors")
    loaded = Backbone.load("mini", weights=folder / "mini.safetensors")
    assert loaded.vit.config == again.vit.config and loaded.preprocessing == again.preprocessing
    assert torch.equal(loaded.vit.cls_token, again.mean.cls_token.half().float())


def test_a_run_of_another_recipe_is_refused(folder, assistant):
    recipes = [pretrain_mini.MiniRecipe(rate=rate) for rate in (1e-3, 2e-3)]
    one, other = (
        mini_training.Training(assistant.vit, assistant.preprocessing, recipe) for recipe in recipes
    )
    one.save(folder / mini_training.CHECKPOINT)
    with pytest.raises(SystemExit, match="another recipe"):
        other.restore(folder / mini_training.CHECKPOINT)


def test_the_rate_rises_stays_and_falls():
    rates = [mini_training.learning_rate(seen, 1000, 1.0) for seen in range(0, 1001, 25)]
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
