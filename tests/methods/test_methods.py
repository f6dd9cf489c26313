"""Every registered method passes the checks that its capabilities ask for, and what is special about each."""

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import typer
from sklearn.neighbors import NearestCentroid

from expect import expect_error
from protosteer.cli import app
from protosteer.errors import SettingsError
from protosteer.evaluation.embedding_cache import EmbeddingCache
from protosteer.methods import METHODS, Answer, find_method
from protosteer.methods.checks import Check, Maker, check_training_changes_what_predicts, checks_for, learn_task
from protosteer.methods.cpp import CPP
from protosteer.methods.finetune import Finetune
from protosteer.methods.ncm import NCM
from protosteer.methods.ridge import Ridge
from protosteer.methods.testing import GROUPS, toy_backbone, toy_images
from protosteer.streams import BENCHMARKS


def maker(name: str, **changes: Any) -> Maker:
    return Maker(find_method(name), changes, EmbeddingCache)


one_maker = cache(maker)  # checks share what was learned


def is_quick(name: str) -> bool:
    """Of those that train, one with prompts and one that trains the whole backbone stand for all in haste."""
    return name in ("cpp", "finetune", "ranpac", "layup") or not hasattr(METHODS[name].settings_class, "epochs")


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(n, c, id=f"{n}-{c.__name__}", marks=() if is_quick(n) else pytest.mark.slow)
        for n in METHODS
        for c in checks_for(METHODS[n])
    ],
)
def test_checks(name: str, check: Check) -> None:
    check(one_maker(name))


def test_checks_find_a_method_that_breaks_them() -> None:
    """One that draws from the caller's generator, forgets its state, and answers before it has learned."""

    class Careless(NCM):
        def learn(self, task):
            super().learn(task)
            self.means = self.means + 1e-3 * torch.randn(self.means.shape)

        def restore(self, state):
            super().restore(state)
            self.tasks = self.tasks[:1]

        def require_knowledge(self):
            pass

    broken = set()
    for check in checks_for(Careless):
        try:
            check(Maker(Careless))
        except Exception:
            broken.add(check.__name__)
    assert broken >= {
        "check_predicting_before_learning_is_an_error",
        "check_seed_determines_the_state",
        "check_state_restores_everything",
        "check_restored_method_continues",
    }


def test_a_stale_cache_is_found() -> None:
    """A method that trains its backbone undeclared would get the embeddings of its first weights."""

    class Undeclared(Finetune):
        trains_backbone = False

    make = Maker(Undeclared, make_images=EmbeddingCache)
    method = make.after(1)
    seen = make.images(method, GROUPS[0])
    before = seen.embed(torch.arange(len(seen)))
    learn_task(method, GROUPS[1])
    assert torch.equal(before, seen.embed(torch.arange(len(seen))))  # stale: what the declaration prevents
    with pytest.raises(AssertionError):
        next(c for c in checks_for(Undeclared) if "given_backbone" in c.__name__)(make)


def test_ncm_is_scikit_learns_nearest_centroid_under_the_cosine():
    make = maker("ncm")
    method = make.after()
    pixels, labels = toy_images([name for group in GROUPS for name in group], per_class=5, seed=90)
    train = [method.backbone.embed_pixels(toy_images(group)[0]) for group in GROUPS]
    names = [label for group in GROUPS for label in toy_images(group)[1]]
    oracle = NearestCentroid().fit(torch.cat(train).numpy(), names)
    # Between vectors of length one the nearest is the most similar.
    oracle.centroids_ = F.normalize(torch.from_numpy(oracle.centroids_).float(), dim=1).numpy()
    expected = oracle.predict(F.normalize(method.backbone.embed_pixels(pixels), dim=1).numpy())
    predicted = [method.classes[k] for some in make.answers(method) for k in some.tolist()]
    assert predicted == expected.tolist() and method.trained_parameters() == 0


def test_ncm_predicts_as_a_learner_without_prompts():
    """To the bit, with one centroid per class and with several; the same tasks count as retrieved."""
    for count in (1, 3):
        alone, learner = maker("ncm", centroids=count), maker("cpp", centroids=count, prompts=False)
        mine, theirs = alone.after(), learner.after()
        for group in GROUPS:
            a = mine.answer(alone.images(mine, group))
            b = theirs.answer(learner.images(theirs, group))
            assert torch.equal(a.classes, b.classes) and torch.equal(a.candidates, b.candidates)
            assert not a.prompts.any()


@pytest.mark.parametrize(
    ("name", "values", "code", "setting"),
    [
        ("ncm", {"epochs": 3}, "unknown-setting", "epochs"),
        ("ncm", {"clustering": "x"}, "unknown-choice", "clustering"),
        ("gdumb", {"cutmix": 1.5}, "setting-out-of-bounds", "cutmix"),
        ("gdumb", {"epochs": 0}, "setting-out-of-bounds", "epochs"),  # the bounds of a default that was changed
        ("lwf", {"temperature": 0.0}, "setting-out-of-bounds", "temperature"),
        ("l2p", {"pool_size": 4}, "pool-too-small", "selected"),
        ("coda-prompt", {"prompt_length": 5}, "odd-prompt-length", "prompt_length"),
        ("coda-prompt", {"components": 25}, "too-many-components", "components"),
    ],
)
def test_impossible_settings_are_rejected(name, values, code, setting):
    method = find_method(name)
    with expect_error(code, SettingsError, name=setting):
        method(toy_backbone(), method.settings_from(values))


def test_unknown_names_are_rejected():
    with expect_error("unknown-preset", SettingsError, name="fast"):
        NCM.preset("fast")
    with expect_error("unknown-method", SettingsError, name="cp"):
        find_method("cp")


NETWORK = toy_backbone().parameters  # of the toy backbone, which has 24 dimensions
ADAPTERS = 2 * (2 * 24 * 4 + 24 + 4)  # per layer: down and up, with their biases
# Bytes that tasks of 2, 3 and 1 classes add, and trained parameters in all.
COUNTS: dict[str, tuple[list[int], int]] = {
    "finetune": ([4 * n * 25 + 4 * first * NETWORK for n, first in ((2, 1), (3, 0), (1, 0))], NETWORK + 6 * 25),
    "aper": ([4 * 2 * 2 * 24 + 2 * 200, 3 * 200, 200], 2 * 2 * 24 + 2 * 24 + 1),
    "s-prompts": ([4 * 48 + n * 116 + 5 * 104 for n in (2, 3, 1)], 3 * 2 * 24 + 6 * 25),
    "ease": ([4 * (ADAPTERS + 24 * n) for n in (2, 2 * 3 + 2, 3 + 5)], 3 * ADAPTERS + 6 * 24 + 3),
    "knn": ([8 * n * 104 for n in (2, 3, 1)], 0),
    "ncm": ([n * 112 for n in (2, 3, 1)], 0),
}


def marked(names: Iterable[str]) -> list[Any]:
    """Names as parameters; in haste, only those of quick methods."""
    return [pytest.param(name, marks=() if is_quick(name) else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked(COUNTS))
def test_bytes_and_parameters_are_counted(name):
    method, fresh = one_maker(name).after(), one_maker(name)()
    assert (method.bytes_per_task(), method.trained_parameters()) == COUNTS[name] and fresh.bytes_per_task() == []


@pytest.mark.parametrize(
    "name",
    marked(n for n, m in METHODS.items() if m.state_fields and not issubclass(m, Ridge)),  # these count as in papers
)
def test_bytes_of_tasks_add_up_to_the_state(name):
    method = one_maker(name).after()
    assert sum(method.bytes_per_task()) == sum(t.nbytes for t in method.state_dict().values())


def test_finetune_trains_every_parameter():
    pairs = zip(one_maker("finetune").after(1).vit.parameters(), one_maker("finetune")().vit.parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs)


def test_cpp_is_the_learner():
    make = maker("cpp")
    method = make.after()
    assert isinstance(method, CPP)
    pixels = toy_images(GROUPS[1], per_class=5, seed=90)[0]
    answer = method.answer(make.images(method, GROUPS[1]))
    labels = [method.classes[k] for k in answer.classes.tolist()]
    assert labels == method.learner.predict(pixels).labels
    assert torch.equal(answer.candidates.sum(dim=1), answer.prompts) and int(answer.prompts.min()) >= 1


@pytest.mark.parametrize("name", METHODS)
def test_published_settings_and_grids_are_valid(name):
    method = METHODS[name]
    default = method.settings_from(method.preset(None))
    assert set(method.published) <= set(BENCHMARKS) and bool(method.published) <= bool(method.published_source)
    for values in method.published.values():
        default.replace(**values)
    for setting, values in method.grid.items():
        assert getattr(default, setting) == values[0], "the default comes first and wins ties"
        assert [getattr(default.replace(**{setting: value}), setting) for value in values] == list(values)
    assert math.prod(map(len, method.grid.values())) == 3, "an equal search for all"


@pytest.mark.filterwarnings("ignore::protosteer.errors.ProtosteerWarning")  # that training changed nothing
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if is_quick(n) else pytest.mark.slow) for n in METHODS])
def test_what_tuning_tries_matters_in_the_first_task(name: str) -> None:
    """Tuning sees the first task alone: a setting without effect there would never be tuned."""
    ((setting, values),) = METHODS[name].grid.items()
    scores = []
    for value in values[:2]:
        make = maker(name, **{setting: value})
        method = make.after(1)
        scores.append(method.answer(make.images(method, GROUPS[0])).scores)
    assert not torch.equal(*scores)


def test_memory_by_the_papers_two_definitions():
    """Two layers of one token of 24 numbers for each task, centroids counted by hand."""
    found = maker("cpp").after(2).paper_bytes()
    assert found["prompt_bytes_per_task"] == 4 * 2 * 24
    prototypes = 2 * 2 * 5  # two keys and two values of each of five classes
    assert found["appendix_bytes_per_class"] == pytest.approx(4 * 24 * (2 * 2 + prototypes + 5) / 5)
    assert list(maker("protosteer").after(2).paper_bytes()) == ["prompt_bytes_per_task"]
    assert maker("ncm").after(2).paper_bytes() == {}


def test_the_command_line_says_where_methods_are_listed():
    commands = typer.main.get_command(app).commands
    option = next(option for option in commands["run"].params if option.name == "method")
    assert "`protosteer methods`" in option.help and "methods" in commands


def test_a_method_whose_backbone_is_not_trained_fails_the_check_though_its_head_is():
    class HeadAlone(METHODS["finetune"]):  # type: ignore[misc, valid-type]
        def parameters(self) -> dict[str, Any]:
            return dict(self.head.named_parameters("head"))

    with pytest.raises(AssertionError, match="training changed nothing"):
        check_training_changes_what_predicts(Maker(HeadAlone))


def test_a_method_that_trains_a_head_on_plain_features_passes_the_check():
    class Linear(METHODS["finetune"]):  # type: ignore[misc, valid-type]
        trains_backbone = False

        def __init__(self, backbone: Any, settings: Any) -> None:
            super().__init__(backbone, settings)
            self.backbone = self.pretrained

        def parameters(self) -> dict[str, Any]:
            return dict(self.head.named_parameters("head"))

    check_training_changes_what_predicts(Maker(Linear))


def test_a_method_whose_training_has_no_effect_fails_the_check():
    class Idle(METHODS["finetune"]):  # type: ignore[misc, valid-type]
        def answer(self, images: Any) -> Answer:
            embeddings = images.embed(torch.arange(len(images)), key="plain", backbone=self.pretrained)
            return Answer(embeddings.argmax(dim=1))

    with pytest.raises(AssertionError, match="training changed nothing"):
        check_training_changes_what_predicts(Maker(Idle))
