"""Predictions of a real learner against the twin in NumPy, which shares no code with the classifier."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy_twin import Answers, Twin, as_tasks

from golden_toys import FOLDER, golden_backbone, numbers, pictures, queries, task
from protosteer.learner import Learner, merge
from protosteer.settings import Settings

QUICK = Settings.preset(
    "best", epochs=2, batch_size=16, neck_hidden=16, augmentation="none", centroids=2, learning_rate=0.05
)


def learned(settings: Settings = QUICK, shared_prompt: torch.Tensor | None = None) -> Learner:
    """Two tasks; the first class has so many images that some are kept as groups."""
    learner = Learner(golden_backbone(), settings, shared_prompt)
    learner.learn(task(ant=46, bee=12), "one")
    learner.learn(task(cat=12, dog=12), "two")
    return learner


def calibrated_by_later_tasks() -> Learner:
    """So many images come after the first task that those it trained the shared prompt with do not calibrate."""
    learner = Learner(golden_backbone(), QUICK.replace(prompt_tasks="first"))
    learner.learn(task(ant=12, bee=12), "one")
    learner.learn(task(cat=26, dog=26), "two")
    return learner


def few_shot() -> Learner:
    learner = learned()
    learner.add_class("elk", pictures("elk", 3))
    learner.add_class("fox", pictures("fox", 1))
    return learner


def repeated() -> Learner:
    learner = learned()
    learner.learn(task(first=100, bee=46, elk=8), "three")
    learner.learn(task(first=200, cat=5), "again")
    return learner


def corrected() -> Learner:
    learner = learned()
    for image in queries()[6:9]:
        label = learner.predict(image).labels[0]
        learner.correct(image, next(name for name in learner.classes if name != label))
    return learner


def merged() -> Learner:
    other = Learner(golden_backbone(), QUICK.replace(independent=True))
    other.learn(task(elk=8, fox=8), "three")
    return merge(learned(), other)


def one_image_each() -> Learner:
    learner = Learner(golden_backbone(), QUICK.replace(prompts=False))
    learner.learn(task(ant=1, bee=1, cat=1), "one")
    return learner


def one_class() -> Learner:
    learner = Learner(golden_backbone(), QUICK)
    learner.learn(task(ant=9), "one")
    return learner


LEARNERS: dict[str, Callable[[], Learner]] = {
    "shared prompt": learned,
    "no prompts": lambda: learned(QUICK.replace(prompts=False)),
    "task prompts alone": lambda: learned(QUICK.replace(independent=True)),
    "first task's prompt alone": lambda: learned(QUICK.replace(prompt_tasks="first")),
    "given shared prompt": lambda: learned(shared_prompt=0.3 * numbers(7, 2, 1, 12)),
    "later tasks calibrate": calibrated_by_later_tasks,
    "few-shot": few_shot,
    "repeated classes": repeated,
    "corrected": corrected,
    "merged": merged,
    "one image per class": one_image_each,
    "one class": one_class,
}
EVIDENCE_FILES = sorted(path.stem for path in FOLDER.glob("*evidence*.protosteer"))


def assert_predicts_as_its_twin(learner: Learner) -> Answers:
    backbone = learner.backbone
    images = backbone.preprocessing(queries(), backbone.device)

    def embed(prompt):
        under = None if prompt is None else torch.tensor(prompt).float()
        return backbone.reading("several").embed(images, under).double().numpy()

    prediction, answers = learner.predict(queries()), Twin(*as_tasks(learner.memory)).predict(embed)
    for part in ("scores", "probabilities", "similarities", "energy"):
        ours, theirs = getattr(prediction, part).numpy(), getattr(answers, part)
        np.testing.assert_allclose(ours, theirs, atol=5e-6, rtol=5e-6, err_msg=part)
    assert prediction.passes.tolist() == answers.passes and prediction.candidates == answers.tried
    return answers


@pytest.mark.parametrize("case", LEARNERS)
def test_a_learner_predicts_as_its_twin(case):
    assert_predicts_as_its_twin(LEARNERS[case]())


@pytest.mark.parametrize("name", EVIDENCE_FILES)
def test_a_golden_file_predicts_as_its_twin(name):
    assert_predicts_as_its_twin(Learner.load(FOLDER / f"{name}.protosteer", golden_backbone()))


def test_the_cases_take_one_to_three_passes_and_try_one_or_two_prompts():
    """What would not be compared otherwise."""
    passes, tried = set(), set()
    for name in EVIDENCE_FILES:
        answers = Learner.load(FOLDER / f"{name}.protosteer", golden_backbone()).predict(queries())
        passes |= set(answers.passes.tolist())
        tried |= {len(names) for names in answers.candidates}
    assert passes == {1, 2, 3} and tried == {0, 1, 2}
