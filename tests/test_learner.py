"""The estimator: generic checks that any such estimator must pass, forgetting and merging."""

import warnings

import pytest
import torch
from PIL import Image

import protosteer
from conftest import easy_task, tiny_backbone
from expect import expect_error
from protosteer.backbones import Backbone
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError, LearnerError, ProtosteerWarning, SettingsError
from protosteer.learner import Learner, merge
from protosteer.model.index import Index
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.paper.inference import match
from protosteer.paper.task import task_seed
from protosteer.paper.vit import ViT, ViTConfig
from protosteer.settings import Settings

QUICK = Settings.preset("paper", epochs=2, batch_size=8, neck_hidden=16, augmentation="crop", centroids=2)
ALONE = QUICK.replace(independent=True)
SPRING, SUMMER, AUTUMN = ["ant", "bee"], ["cat", "dog", "eel"], ["fox"]


def taught(*tasks: list[str], settings: Settings = QUICK) -> Learner:
    learner = Learner(tiny_backbone(), settings)
    for classes in tasks:
        learner.learn(easy_task(classes), name=classes[0])
    return learner


def bits(record: TaskRecord) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in record.tensors()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_predict_before_learn_is_refused():
    with expect_error("nothing-learned", LearnerError):
        Learner(tiny_backbone()).predict(easy_task(["ant"])[0])
    with expect_error("nothing-learned", LearnerError):
        Learner(tiny_backbone()).save("never.protosteer")


def test_learns_and_predicts_classes_over_several_tasks():
    learner = taught(SPRING, SUMMER, AUTUMN)
    assert learner.classes == [*SPRING, *SUMMER, *AUTUMN] and learner.tasks == ["ant", "cat", "fox"]
    images, labels = easy_task(learner.classes, per_class=6, seed=50)
    prediction = learner.predict(images)
    hits = sum(a == b for a, b in zip(prediction.labels, labels, strict=True))
    assert hits >= 0.9 * len(labels) and prediction.scores.shape == prediction.probabilities.shape == (36, 6)
    torch.testing.assert_close(prediction.probabilities.sum(dim=1), torch.ones(36))


def test_many_equal_one():
    learner = taught(SPRING, SUMMER)
    images, _ = easy_task([*SPRING, *SUMMER], per_class=3, seed=7)
    together = learner.predict(images)
    for i in range(len(images)):
        alone = learner.predict(images[i : i + 1])
        assert alone.labels[0] == together.labels[i] and alone.candidates[0] == together.candidates[i]
        torch.testing.assert_close(alone.scores[0], together.scores[i], rtol=0, atol=1e-5)


def test_predict_changes_nothing():
    learner = taught(SPRING, SUMMER)
    images, _ = easy_task(SPRING, seed=7)
    records = [bits(task) for task in learner.memory.tasks]
    first = learner.predict(images).scores
    assert torch.equal(first, learner.predict(images).scores)
    assert all(same(a, bits(b)) for a, b in zip(records, learner.memory.tasks, strict=True))


def test_same_seed_same_result_and_another_seed_another():
    one, two = taught(SPRING, SUMMER), taught(SPRING, SUMMER)
    other = taught(SPRING, SUMMER, settings=QUICK.replace(seed=1))
    assert all(same(bits(a), bits(b)) for a, b in zip(one.memory.tasks, two.memory.tasks, strict=True))
    assert not same(bits(one.memory.tasks[0]), bits(other.memory.tasks[0]))


def test_nothing_of_a_task_changes_when_the_next_is_learned():
    learner = taught(SPRING)
    before = bits(learner.memory.tasks[0])
    learner.learn(easy_task(SUMMER))
    assert same(before, bits(learner.memory.tasks[0]))


def test_memory_grows_by_the_same_for_every_task():
    learner = taught(["a", "b"], ["c", "d"], ["e", "f"])
    assert len({task.bytes for task in learner.memory.tasks}) == 1


def test_a_failed_task_leaves_the_learner_as_it_was():
    learner = taught(SPRING)

    def interrupt(stage):
        if stage.doing == "values":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.learn(easy_task(SUMMER), on_stage=interrupt)
    assert learner.classes == SPRING


def test_an_existing_task_is_refused_before_any_work():
    learner = taught(SPRING)
    called = []
    with pytest.raises(LearnerError, match="task named 'ant' exists"):
        learner.learn(easy_task(SUMMER), name="ant", on_stage=called.append)
    assert not called


def test_stages_are_told_in_order():
    stages = []
    Learner(tiny_backbone(), QUICK).learn(easy_task(SPRING), on_stage=stages.append)
    order = [stage.doing for stage in stages]
    assert sorted(set(order), key=order.index) == ["keys", "training", "values"]
    assert all(stage.done <= stage.total for stage in stages) and stages[-1].done == stages[-1].total


def test_folder_of_class_folders_and_every_way_to_predict(tmp_path):
    images, labels = easy_task(SPRING)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        (tmp_path / "photos" / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / "photos" / label / f"{i:02}.png")
    learner = Learner(tiny_backbone(), QUICK)
    record = learner.learn(tmp_path / "photos")
    assert record.name == "task-1" and learner.classes == SPRING
    files = sorted((tmp_path / "photos").rglob("*.png"))
    expected = learner.predict(images).labels
    assert learner.predict(tmp_path / "photos").labels == expected and learner.predict(files).labels == expected
    assert learner.predict([Image.open(file) for file in files]).labels == expected
    assert learner.predict(str(files[0])).labels == expected[:1]


def test_one_class_and_one_image_can_be_learned():
    learner = Learner(tiny_backbone(), QUICK)
    learner.learn(easy_task(["only"], per_class=1))
    learner.learn(easy_task(["other"], per_class=2))
    assert learner.classes == ["only", "other"]
    assert learner.predict(easy_task(["other"], seed=4)[0]).labels.count("other") >= 6


def test_whole_numbers_become_names_and_empty_data_is_refused():
    learner = Learner(tiny_backbone(), QUICK)
    learner.learn((easy_task(SPRING)[0], [3] * 8 + [10] * 8))
    assert learner.classes == ["10", "3"]
    with pytest.raises(DataError):
        learner.learn((torch.zeros(0, 3, 16, 16, dtype=torch.uint8), []))


def test_the_papers_rule_knows_no_prompt_for_all_classes(tmp_path):
    """Not even in a model that has one: what is learned by it can be read back."""
    learner = Learner(tiny_backbone(), Settings.preset("best", epochs=1, batch_size=8, neck_hidden=16))
    learner.learn(easy_task(["ant", "bee"]))
    learner.settings = learner.settings.with_preset("paper").replace(epochs=1)
    assert learner.shared_prompt is None is not learner.memory.shared_prompt
    learner.learn(easy_task(["cat", "dog"]))
    learner.add_class("eel", easy_task(["eel"], per_class=3)[0])
    learner.save(tmp_path / "m.protosteer")
    read = Learner.load(tmp_path / "m.protosteer", tiny_backbone())
    assert [task.shared_prompt is None for task in read.memory.tasks] == [False, True, True]


def test_a_forgotten_class_is_never_predicted_and_the_rest_is_untouched():
    learner = taught(SPRING, SUMMER)
    before = bits(learner.memory.tasks[0])
    outcome = learner.forget("dog")
    assert "dog" not in learner.classes and outcome.classes == ["dog"] and outcome.bytes > 0
    assert "dog" not in learner.predict(easy_task(["dog"])[0]).labels
    assert same(before, bits(learner.memory.tasks[0]))
    assert not outcome.exact and "prompt of task 'cat' was trained with its images" in outcome.guarantee


def test_forgetting_says_that_later_prompts_saw_the_prototypes():
    outcome = taught(SPRING, SUMMER).forget(task="ant")
    assert not outcome.exact and "later tasks" in outcome.guarantee


def test_forgetting_the_last_task_is_exact():
    learner = taught(SPRING, SUMMER)
    outcome = learner.forget(task="cat")
    assert outcome.exact and same(bits(learner.memory.tasks[0]), bits(taught(SPRING).memory.tasks[0]))


def test_forgetting_in_the_training_free_baseline_is_exact():
    assert taught(SPRING, SUMMER, settings=QUICK.replace(prompts=False)).forget("dog").exact


def test_forgetting_an_independent_task_equals_never_having_learned_it():
    learner = taught(SPRING, SUMMER, AUTUMN, settings=ALONE)
    assert learner.forget(task="cat").exact
    never = taught(SPRING, AUTUMN, settings=ALONE)
    assert learner.tasks == never.tasks
    assert all(same(bits(a), bits(b)) for a, b in zip(learner.memory.tasks, never.memory.tasks, strict=True))
    images, _ = easy_task([*SPRING, *SUMMER], seed=5)
    assert torch.equal(learner.predict(images).scores, never.predict(images).scores)


def test_forgetting_a_dependent_task_is_not_exact_indeed():
    learner = taught(SPRING, SUMMER, AUTUMN)
    learner.forget(task="cat")
    never = taught(SPRING, AUTUMN)
    assert not same(bits(learner.memory.tasks[1]), bits(never.memory.tasks[1]))


def test_what_to_forget_must_be_said_and_exist():
    learner = taught(SPRING)
    with pytest.raises(LearnerError, match="say what to forget"):
        learner.forget()
    with pytest.raises(LearnerError, match="no class named 'yak'; there are: ant, bee"):
        learner.forget("yak")


def test_merging_independent_learners_equals_having_learned_both():
    merged = merge(taught(SPRING, settings=ALONE), taught(SUMMER, AUTUMN, settings=ALONE))
    both = taught(SPRING, SUMMER, AUTUMN, settings=ALONE)
    assert merged.tasks == both.tasks
    assert all(same(bits(a), bits(b)) for a, b in zip(merged.memory.tasks, both.memory.tasks, strict=True))
    images, _ = easy_task([*SPRING, *AUTUMN], seed=5)
    assert torch.equal(merged.predict(images).scores, both.predict(images).scores)


def test_merging_leaves_its_parts_alone():
    a, b = taught(SPRING), taught(SUMMER)
    merge(a, b).forget("ant")
    assert a.classes == SPRING and b.classes == SUMMER


def test_what_cannot_be_merged_is_refused():
    a = taught(SPRING)
    with pytest.raises(LearnerError, match="two tasks are named 'ant'"):
        merge(a, taught(SPRING))
    with pytest.raises(LearnerError, match="neighbours is 3 and 1"):
        merge(a, taught(SUMMER, settings=QUICK.replace(neighbours=1)))
    with pytest.raises(LearnerError, match="different backbones"):
        merge(a, Learner(tiny_backbone(seed=1), QUICK))
    with expect_error("nothing-to-merge", LearnerError):
        merge()


def test_weights_near_chance_are_reported_when_the_first_task_is_learned():
    noise = torch.randint(0, 256, (40, 3, 16, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    with pytest.warns(ProtosteerWarning, match="hardly tells these 4 classes apart"):
        Learner(tiny_backbone(), QUICK.replace(prompts=False)).learn((noise, [i % 4 for i in range(40)]))


def test_collapse_is_reported(monkeypatch):
    learner = Learner(tiny_backbone(), QUICK)
    plain = learner.backbone.embed_set

    def collapsed(images, prompt=None, *rest, **named):
        embeddings = plain(images, prompt, *rest, **named)
        return embeddings if prompt is None else embeddings * 0.001 + 1

    monkeypatch.setattr(learner.backbone, "embed_set", collapsed)
    with pytest.warns(ProtosteerWarning, match="the prompt has collapsed"):
        learner.learn(easy_task(SUMMER))


def test_good_data_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert taught(SPRING, SUMMER).classes == [*SPRING, *SUMMER]


def test_seed_belongs_to_the_classes_not_to_the_order():
    assert task_seed(0, ["a", "b"]) == task_seed(0, ["b", "a"]) != task_seed(1, ["a", "b"])
    assert task_seed(0, ["a"]) != task_seed(0, ["b"]) and 0 <= task_seed(0, ["a"]) < 2**63


def test_public_names():
    assert protosteer.Learner is Learner and protosteer.merge is merge
    assert set(protosteer.__all__) <= set(dir(protosteer))
    with pytest.raises(AttributeError, match="no attribute 'learner_of_things'"):
        _ = protosteer.learner_of_things


def test_late_prompts_share_a_trunk_and_predict_the_same():
    """Prediction runs the layers before the prompts once; embedding everything anew must give the same."""
    learner = Learner(deep_backbone(), QUICK.replace(prompt_from_layer=3))
    for classes in (["ant", "bee"], ["cat", "dog"]):
        learner.learn(easy_task(classes), name=classes[0])
    assert [tuple(task.prompt.shape) for task in learner.memory.tasks] == [(2, 1, 24)] * 2
    assert learner.reader.index.shared_layers(4) == 2
    pixels = easy_task(["ant", "dog"], seed=50)[0]
    shared = learner.predict(pixels)

    def embed(rows: torch.Tensor, tasks: torch.Tensor | None) -> torch.Tensor:
        numbers = [None] * len(rows) if tasks is None else tasks.tolist()
        prompts = [None if t is None else learner.memory.tasks[t].prompt for t in numbers]
        one_by_one = zip(pixels[rows].split(1), prompts, strict=True)
        return torch.cat([learner.backbone.embed_pixels(one, prompt) for one, prompt in one_by_one])

    plain = match(Index.build(learner.memory).prototypes, embed, len(pixels), learner.settings.neighbours)
    torch.testing.assert_close(shared.scores, plain.scores, atol=1e-6, rtol=0)
    assert (shared.scores.argmax(1) == plain.scores.argmax(1)).all()


def test_tasks_whose_prompts_begin_in_different_layers_live_together():
    early, late = (Learner(deep_backbone(), QUICK.replace(prompt_from_layer=k)) for k in (2, 3))
    early.learn(easy_task(["ant", "bee"]), name="early")
    late.learn(easy_task(["cat", "dog"]), name="late")
    both = merge(early, late)
    assert both.reader.index.shared_layers(4) == 1
    assert both.predict(easy_task(["ant", "dog"], seed=50)[0]).labels.count("ant") > 4
    both.learn(easy_task(["eel"]), name="after")  # the last prompt has another shape: it starts at zero
    assert tuple(both.memory.tasks[-1].prompt.shape) == (3, 1, 24)


@pytest.mark.parametrize(("kind", "layer"), [("deep", 4), ("deep", 9), ("shallow", 2)])
def test_a_prompt_that_begins_too_late_is_refused(kind, layer):
    with pytest.raises(SettingsError, match=f"prompt_from_layer = {layer}"):
        Learner(deep_backbone(), QUICK.replace(prompt_kind=kind, prompt_from_layer=layer)).learn(
            easy_task(["ant", "bee"])
        )


def deep_backbone() -> Backbone:
    """Four layers, so that prompts can begin in the middle."""
    torch.manual_seed(3)
    vit = ViT(ViTConfig(image_size=16, patch_size=8, dim=24, depth=4, heads=3, mlp_dim=48))
    with torch.no_grad():
        for name, parameter in vit.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.2)
    half = (0.5, 0.5, 0.5)
    return Backbone("four layers", vit, Preprocessing(16, half, half))


def test_the_index_is_kept_until_what_is_remembered_changes():
    learner = Learner(tiny_backbone(), QUICK.replace(prompts=False))
    learner.learn(easy_task(["ant", "bee"]))
    first = learner.reader.index
    learner.predict(easy_task(["ant"])[0])
    assert learner.reader.index is first
    learner.learn(easy_task(["cat"]))
    assert learner.reader.index is not first and learner.reader.index.classes == ["ant", "bee", "cat"]
    learner.forget("ant")
    assert learner.reader.index.classes == ["bee", "cat"]
    learner.memory = Memory(learner.memory.tasks[:1])
    assert learner.reader.index.classes == ["bee"]


def test_the_old_name_of_the_shared_prompt_warns():
    prompt = torch.zeros(tiny_backbone().prompt_shape(1))
    with pytest.deprecated_call():
        learner = Learner(tiny_backbone(), domain=prompt)
    with pytest.deprecated_call():
        assert torch.equal(learner.domain, prompt)
    assert torch.equal(Learner(tiny_backbone(), shared_prompt=prompt).shared_prompt, prompt)
    assert Learner(tiny_backbone(), QUICK, prompt).shared_prompt is None  # CPP inference has none


def test_a_reader_is_built_once_per_memory_and_settings():
    learner = taught(SPRING)
    reader = learner.reader
    assert learner.reader is reader is learner.copy().reader
    learner.settings = learner.settings.replace(neighbours=1)
    assert learner.reader is not reader
    other = learner.copy()
    other.forget("ant")
    assert other.reader is not learner.reader and learner.reader.index.classes == SPRING


def test_a_learner_says_what_it_is_and_shows_progress_if_asked_to(capsys):
    learner = Learner(tiny_backbone(), Settings.preset("instant"))
    assert "nothing learned yet" in repr(learner)
    stages = []
    learner.learn(easy_task(["ant", "bee"], 4), on_stage=stages.append, progress=True)
    assert "2 classes in 1 task from 8 images" in repr(learner) and stages
    learner.learn(easy_task(["cat"], 4))  # here is no terminal
    assert capsys.readouterr().err == ""
