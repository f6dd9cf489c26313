"""A class from a handful of images: known at once, under a copy of the nearest task's prompt."""

import pytest
import torch
import torch.nn.functional as F

from conftest import easy_task, tiny_backbone
from photo_toys import ALONE, QUICK, file_bytes
from protosteer.backbones import Backbone
from protosteer.errors import DataError
from protosteer.learner import Learner
from protosteer.tasks import nearest_task


@pytest.fixture(scope="module")
def before() -> Learner:
    """Knows two tasks; never changed by a test."""
    learner = Learner(tiny_backbone(), QUICK)
    learner.learn(easy_task(["ant", "bee"]), name="spring")
    learner.learn(easy_task(["cat", "dog"]), name="summer")
    return learner


def few(name: str, count: int = 5, seed: int = 3) -> torch.Tensor:
    return easy_task([name], per_class=count, seed=seed)[0]


def forward_passes(monkeypatch, learner: Learner, images: torch.Tensor) -> int:
    """Images that the backbone's prompted part sees in one prediction, counted there."""
    seen = []
    plain = Backbone.embed_tokens

    def embed_tokens(self, tokens, *others):
        seen.append(len(tokens))
        return plain(self, tokens, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Backbone, "embed_tokens", embed_tokens)
        learner.predict(images)
    return sum(seen)


def test_classes_are_recognised_at_once_and_the_others_still_are(before):
    learner, new = before.copy(), ["emu", "fox", "gnu"]
    for name in new:
        record = learner.add_class(name, few(name))
        assert record is learner.memory.tasks[-1] and record.few_shot and record.class_names == [name]
    assert learner.classes == [*before.classes, *new] and learner.tasks == ["spring", "summer", *new]
    images, labels = easy_task(learner.classes, per_class=10, seed=70)
    right = [a for a, b in zip(learner.predict(images).labels, labels, strict=True) if a == b]
    assert all(right.count(name) >= 8 for name in learner.classes)
    assert before.classes == ["ant", "bee", "cat", "dog"]


def test_the_prompt_is_a_copy_of_the_nearest_tasks(before):
    for like, task in (("ant", 0), ("dog", 1)):
        images = few(like)
        queries = before.backbone.embed_pixels(images)
        own = []
        for record in before.memory.tasks:
            keys = torch.cat([c.keys for c in record.classes])
            own.append(F.cosine_similarity(queries[:, None], keys[None], dim=2).amax(dim=1).mean())
        assert nearest_task(before.reader.index.prototypes, queries) == int(torch.stack(own).argmax()) == task
        record = before.copy().add_class("new", images)
        assert torch.equal(record.prompt, before.memory.tasks[task].prompt)
        values = before.backbone.embed_pixels(images, record.prompt)
        torch.testing.assert_close(record.classes[0].values.means, values.mean(dim=0)[None])
        torch.testing.assert_close(record.classes[0].keys, queries.mean(dim=0)[None])


@pytest.mark.parametrize(("count", "groups"), [(1, 1), (4, 1), (9, 1), (10, 2), (14, 2), (25, 2)])
def test_one_centroid_for_five_images_but_no_more_than_the_settings_say(before, count, groups):
    record = before.copy().add_class("yak", few("yak", count)).classes[0]
    assert len(record.values.means) == groups and record.images == count


def test_a_copied_prompt_brings_no_second_forward_pass(before, monkeypatch):
    learner, everything = before.copy(), before.copy()
    images = few("bee", 6, seed=70)
    learner.settings = everything.settings = QUICK.replace(neighbours=1000)  # every task is a candidate
    passes = forward_passes(monkeypatch, learner, images)
    assert passes == 3 * len(images)  # none, spring's, summer's
    for name in ("wasp", "fly", "gnat"):
        everything.add_class(name, few("bee"))
    assert everything.reader.index.prompt_owners.tolist() == [0, 1, 0, 0, 0]
    assert forward_passes(monkeypatch, everything, images) == passes
    assert all(len(tried) == 5 for tried in everything.predict(images).candidates)


def test_without_prompts_there_is_none_to_copy():
    learner = Learner(tiny_backbone(), QUICK.replace(prompts=False))
    first = learner.add_class("ant", few("ant"))  # the very first class of a model
    second = learner.add_class("bee", few("bee"))
    assert first.prompt is None and second.prompt is None and first.independent
    assert learner.predict(few("bee", seed=70)).labels == ["bee"] * 5


def test_a_class_may_be_called_as_a_task_and_grow(before):
    learner = before.copy()
    assert learner.add_class("spring", few("yak")).name == "spring-2"
    with pytest.raises(DataError, match="no name"):
        learner.add_class("  ", few("yak"))
    with pytest.raises(DataError, match="no images"):
        learner.add_class("gnu", few("yak")[:0])
    assert learner.add_class("spring", few("yak")).name == "spring-3"
    assert learner.tasks == ["spring", "summer", "spring-2", "spring-3"]
    assert learner.classes[-1] == "spring" and len(learner.classes) == len(before.classes) + 1


def test_held_out_similarities_come_from_leaving_each_image_out(before):
    record = before.copy().add_class("yak", few("yak", 4))
    values = before.backbone.embed_pixels(few("yak", 4), record.prompt)
    for i, similarity in enumerate(record.classes[0].heldout_similarities):
        others = values[[j for j in range(4) if j != i]].mean(dim=0)
        torch.testing.assert_close(similarity, F.cosine_similarity(values[i], others, dim=0))
    assert before.copy().add_class("yak", few("yak", 1)).classes[0].heldout_similarities is None


def test_forgetting_the_class_or_what_came_after_its_prompt_is_exact(before, tmp_path):
    learner = before.copy()
    learner.add_class("yak", few("yak"))
    outcome = learner.forget("yak")
    assert outcome.exact and outcome.tasks == ["yak"] and outcome.bytes > 0
    assert file_bytes(learner, tmp_path) == file_bytes(before, tmp_path)
    learner.add_class("wasp", few("bee"))  # spring's prompt, which never saw summer
    assert learner.forget(task="summer").exact


@pytest.mark.parametrize("whole", [True, False])
def test_forgetting_the_original_says_that_a_copy_remains(whole):
    learner = Learner(tiny_backbone(), ALONE)
    learner.learn(easy_task(["ant", "bee"]), name="spring")
    learner.learn(easy_task(["cat", "dog"]), name="summer")
    learner.add_class("wasp", few("bee"))
    learner.add_class("fly", few("bee", seed=5))  # a copy of a copy, if that is nearest
    assert all(task.independent for task in learner.memory.tasks)
    outcome = learner.forget(task="spring") if whole else learner.forget("ant")
    assert not outcome.exact and "task 'wasp' uses a copy of the prompt" in outcome.guarantee
    assert "wasp" in learner.classes


def test_a_copy_of_a_dependent_prompt_outlives_its_original_and_is_not_forgotten_about(before):
    """summer was trained against spring; wolf has summer's prompt, though summer is gone."""
    learner = before.copy()
    learner.add_class("wolf", few("dog"))
    assert not learner.memory.tasks[2].independent
    learner.forget(task="summer")
    outcome = learner.forget(task="spring")
    assert not outcome.exact and "trained against its prototypes" in outcome.guarantee


def test_a_prompt_trained_after_a_few_shot_class_was_trained_against_it(before):
    learner = before.copy()
    learner.add_class("yak", few("yak"))
    learner.learn(easy_task(["eel", "fox"]), name="autumn")
    outcome = learner.forget("yak")
    assert not outcome.exact and "later tasks" in outcome.guarantee
