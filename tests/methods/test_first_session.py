"""The first session: the shared prompt of `fast`, prompts and adapters, and what is embedded under them."""

import pytest
import torch

from protosteer import Learner, Settings
from protosteer.evaluation.embedding_cache import EmbeddingCache
from protosteer.methods import METHODS, checks
from protosteer.methods.adapters import with_adapters
from protosteer.methods.checks import Maker
from protosteer.methods.per_task_tuning import tune_adapters
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images, toy_task

SMALL = {"epochs": 2, "batch_size": 8, "learning_rate": 0.01, "augmentation": "crop"}


ADAPTER = {**SMALL, "first_session": "adapter", "learning_rate": 0.3, "adapter_scale": 1.0}
CHECKS = (  # the others do not depend on what was adapted
    checks.check_batches_do_not_change_predictions,
    checks.check_seed_determines_the_state,
    checks.check_state_restores_everything,
    checks.check_restored_method_continues,
    checks.check_interrupted_training_resumes,
    checks.check_given_backbone_is_unchanged,
)
KINDS = [(name, kind) for name in ("ranpac", "layup") for kind in ("prompt", "vpt")]  # adapters are their default


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [*KINDS, ("aper", "adapter")])
def test_checks_pass_with_every_kind(name, kind):
    make = Maker(METHODS[name], ADAPTER if kind == "adapter" else {"first_session": kind, **SMALL})
    for check in CHECKS:
        check(make)
    labels = [make.after().classes.index(label) for group in GROUPS for label in group for _ in range(5)]
    found = torch.cat(make.answers(make.after()))
    assert (found == torch.tensor(labels)).float().mean() > 0.8


def test_the_prompt_is_that_of_the_preset_fast():
    method = Maker(METHODS["ranpac"], {"first_session": "prompt", **SMALL}).after()
    settings = Settings.preset("fast", **SMALL)
    record = Learner(toy_backbone(), settings).learn((toy_task(GROUPS[0]).train, toy_task(GROUPS[0]).train_labels))
    assert torch.equal(method.adaptation["prompt"], record.prompt)
    assert method.trained_parameters() == record.metadata.trained_parameters


def test_zeros_stand_for_the_defaults_of_each_kind():
    settings = METHODS["ranpac"].settings_from({"first_session": "prompt", "seed": 3})
    assert settings.prompt_training() == Settings.preset("fast", seed=3)
    training = settings.training()
    assert (training.epochs, training.batch_size, training.learning_rate) == (20, 48, 0.01)


@pytest.mark.parametrize("name", ["ranpac", "layup", "aper"])
def test_features_are_those_of_the_adapted_backbone(name):
    make = Maker(METHODS[name], ADAPTER, make_images=EmbeddingCache)
    method, backbone = make.after(), toy_backbone()
    adapters = tune_adapters(toy_task(GROUPS[0]), backbone, method.settings, 64, 1.0)
    adapted = with_adapters(backbone, adapters, 1.0, trainable=False)
    expected = adapted.embed_pixels(toy_images(GROUPS[1], per_class=5, seed=90)[0], method.features)
    found = method.embed(make.images(method, GROUPS[1]))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    plain = backbone.embed_pixels(toy_images(GROUPS[1], per_class=5, seed=90)[0], method.features)
    assert not torch.allclose(found, plain, atol=1e-5)


def test_a_single_class_is_not_adapted_to():
    method = METHODS["ranpac"](
        toy_backbone(), METHODS["ranpac"].settings_from({"first_session": "prompt", "features": 9})
    )
    method.learn(toy_task(["ant"]))
    assert method.adaptation == {} and method.trained_parameters() == 0
