"""Unknown images: the threshold comes from images that were not learned and rejects at most the share asked
for."""

from types import SimpleNamespace

import pytest
import torch

from conftest import easy_task, tiny_backbone
from expect import expect_error
from photo_toys import photos, taught
from protosteer.errors import LearnerError, SettingsError
from protosteer.learner import Learner
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskRecord
from protosteer.paper.prototypes import centroids
from protosteer.settings import Settings
from protosteer.workflows.ood import Rejection, class_thresholds, is_calibrated, rejected_share, threshold

VALUES = centroids(torch.eye(4), 2)
INSTANT = Settings.preset("instant")


def drawn(similarities: torch.Tensor) -> SimpleNamespace:
    """All that a threshold asks of a learner, for thousands of draws."""
    return SimpleNamespace(reader=SimpleNamespace(known_similarities=lambda: similarities))


def known_by(*held_out: torch.Tensor | None) -> Learner:
    """One task per class, by the paper's rule."""
    learner = Learner(tiny_backbone(), Settings.preset("paper"))
    learner.memory = Memory(
        TaskRecord(f"t{i}", ClassTable.of([ClassRecord(f"c{i}", torch.eye(4), VALUES, held)]), None)
        for i, held in enumerate(held_out)
    )
    return learner


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    place = tmp_path_factory.mktemp("rejection")
    folders = [photos(place / "spring", ["ant", "bee"], 20), photos(place / "summer", ["cat", "dog"], 20)]
    return taught(*folders)


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3, 0.5, 0.99])
def test_the_threshold_is_a_rank_over_all_classes(fraction):
    similarities = torch.rand(199, generator=torch.Generator().manual_seed(0))
    parts = known_by(similarities[:3], None, similarities[3:150], similarities[150:])
    assert threshold(parts, fraction) == sorted(similarities.tolist())[round(fraction * 200) - 1]
    assert is_calibrated(parts) and threshold(parts, 0.0) == -torch.inf


@pytest.mark.parametrize(("held", "fraction"), [(9, 0.1), (19, 0.05), (21, 0.05), (40, 0.2)])
def test_a_new_known_image_is_rejected_with_at_most_that_chance(held, fraction):
    """Over many draws of held-out and new images; the plain quantile would reject more."""
    draw = torch.Generator().manual_seed(0)
    rejected = sum(
        float(torch.rand(1, generator=draw)) < threshold(drawn(torch.rand(held, generator=draw)), fraction)
        for _ in range(2000)
    )
    assert 0.6 * fraction <= rejected / 2000 <= 1.15 * fraction


@pytest.mark.parametrize("fraction", [-0.01, 1.0, 5.0, float("nan")])
def test_fractions_that_are_none_are_refused(fraction):
    with expect_error("bad-reject", SettingsError):
        threshold(known_by(torch.ones(3)), fraction)


@pytest.mark.parametrize("held_out", [(), (None, None), (None, torch.empty(0))])
def test_a_model_without_held_out_images_is_not_calibrated(held_out):
    assert not is_calibrated(known_by(*held_out))
    for fraction in (0.0, 0.05):
        with expect_error("not-calibrated", LearnerError):
            threshold(known_by(*held_out), fraction)


def test_about_that_share_of_new_known_images_is_rejected_and_more_of_others(known):
    limit = threshold(known, 0.2)
    new = known.predict(easy_task(known.classes, per_class=30, seed=900)[0]).scores.amax(dim=1)
    strange = known.predict(easy_task(["yak", "gnu", "emu"], per_class=30, seed=900)[0]).scores.amax(dim=1)
    assert float((new < limit).float().mean()) <= 0.3
    assert float((strange < limit).float().mean()) >= 0.6


def test_the_threshold_goes_with_the_classes_that_it_came_from(known):
    smaller = known.copy()
    smaller.forget(task="summer")
    left = torch.cat([c.heldout_similarities for c in known.memory.tasks[0].classes])
    assert threshold(smaller, 0.25) == float(left.sort().values[int(0.25 * (len(left) + 1)) - 1])


def test_a_class_of_few_images_lowers_the_threshold_for_itself_alone(known):
    images, _ = easy_task(["yak"], per_class=5, seed=3)
    learner = known.copy()
    own = float(learner.add_class("yak", images).classes[0].heldout_similarities.min())
    before = threshold(known, 0.2)
    assert threshold(learner, 0.2) == before and class_thresholds(learner) == {"yak": own}
    rejection = Rejection(learner, 0.2)
    least = min(own, before)
    assert rejection.unknown("yak", least - 1e-4) and not rejection.unknown("yak", least + 1e-4)
    assert rejection.unknown("ant", before - 1e-4) and not rejection.unknown("ant", before + 1e-4)


def test_a_model_of_few_shot_classes_alone_has_a_common_threshold():
    alone = known_by(torch.tensor([0.9, 0.8]), torch.tensor([0.7, 0.95]))
    assert class_thresholds(alone) == {} and threshold(alone, 0.4) == pytest.approx(0.8)


@pytest.fixture(scope="module")
def instant():
    """Two tasks by evidence, nothing held out."""
    learner = Learner(tiny_backbone(), INSTANT)
    learner.learn(easy_task(["ant", "bee"], per_class=20), name="spring")
    learner.learn(easy_task(["cat", "dog"], per_class=20), name="summer")
    return learner


def test_by_evidence_every_image_left_out_has_a_say_and_nothing_is_held_out(instant):
    ordered = instant.reader.known_similarities().sort().values
    assert is_calibrated(instant) and len(ordered) == 80 and class_thresholds(instant) == {}
    assert threshold(instant, 0.1) == float(ordered[int(0.1 * 81) - 1])


def test_by_evidence_about_that_share_of_new_known_images_is_rejected_and_most_others(instant):
    new = instant.predict(easy_task(instant.classes, per_class=30, seed=900)[0])
    strange = instant.predict(easy_task(["yak", "gnu", "emu"], per_class=30, seed=900)[0])
    limit = threshold(instant, 0.2)
    assert 0.05 <= float((new.similarities.amax(dim=1) < limit).float().mean()) <= 0.4
    assert float((strange.similarities.amax(dim=1) < limit).float().mean()) >= 0.8


def test_by_evidence_a_class_of_a_handful_takes_part_and_one_of_a_single_image_does_not(instant):
    few = instant.copy()
    few.add_class("yak", easy_task(["yak"], per_class=5, seed=3)[0])
    assert len(few.reader.known_similarities()) == 85 and class_thresholds(few) == {}
    few.add_class("gnu", easy_task(["gnu"], per_class=1, seed=3)[0])
    assert len(few.reader.known_similarities()) == 85


def test_by_evidence_classes_of_one_image_each_cannot_tell():
    learner = Learner(tiny_backbone(), INSTANT)
    learner.learn(easy_task(["ant", "bee"], per_class=1))
    assert not is_calibrated(learner)
    with expect_error("not-calibrated", LearnerError):
        Rejection(learner, 0.05)


def test_a_model_that_has_learned_nothing_is_not_calibrated():
    assert not is_calibrated(Learner(tiny_backbone()))


def test_the_interval_covers_the_share_that_is_rejected():
    """Similarities are uniform, so the share below a threshold is the threshold."""
    draw = torch.Generator().manual_seed(0)
    low, high = rejected_share(drawn(torch.rand(99, generator=draw)), 0.1)
    shares = [100 * threshold(drawn(torch.rand(99, generator=draw)), 0.1) for _ in range(2000)]
    below, above = (sum(s < low for s in shares) / 2000, sum(s > high for s in shares) / 2000)
    assert below == pytest.approx(0.025, abs=0.012) and above == pytest.approx(0.025, abs=0.012)


def test_too_few_images_for_a_fraction_reject_nothing():
    few = known_by(torch.rand(18))
    assert threshold(few, 0.05) == -torch.inf and rejected_share(few, 0.05) == (0.0, 0.0)
    assert not Rejection(few, 0.05).unknown("c0", -1.0)
