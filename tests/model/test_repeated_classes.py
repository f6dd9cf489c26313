"""A class that has records in several tasks: what it is known by, and what becomes of it."""

import dataclasses

import torch

from conftest import easy_task, tiny_backbone
from many_toys import many, near
from photo_toys import file_bytes
from protosteer.evidence.class_statistics import ClassStatistics
from protosteer.evidence.prototype_summary import EXACT_PROTOTYPES, ClassSummary, summarise_class
from protosteer.evidence.scorer import CoarseScorer
from protosteer.evidence.summary_table import SummaryTable
from protosteer.learner import Learner, merge
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.paper import trainer
from protosteer.rules import RULES, EvidenceRule
from protosteer.search.candidates import CandidateOptions
from protosteer.settings import Settings

INSTANT = Settings.preset("instant")
QUICK = Settings.preset("paper", epochs=1, batch_size=8, neck_hidden=16, augmentation="none", centroids=2)
CLASSES = ["ant", "bee", "cat"]
DIM = 12


def parts(per_class: int = 12, first: int = 5) -> tuple[tuple, tuple]:
    """Images of three classes: the first few of each, and the rest."""
    images, labels = easy_task(CLASSES, per_class, seed=3)
    early = torch.tensor([i % per_class < first for i in range(len(labels))])

    def some(mask):
        return images[mask], [label for label, wanted in zip(labels, mask.tolist(), strict=True) if wanted]

    return some(early), some(~early)


def grown(*tasks: tuple, settings: Settings = INSTANT) -> Learner:
    learner = Learner(tiny_backbone(), settings)
    for number, task in enumerate(tasks):
        learner.learn(task, name=f"t{number}")
    return learner


def test_learned_in_two_parts_a_class_is_what_it_is_learned_at_once():
    early, late = parts()
    whole = grown(easy_task(CLASSES, 12, seed=3))
    learner = grown(early, late)
    assert learner.classes == CLASSES and learner.tasks == ["t0", "t1"]
    assert learner.memory.owners == dict.fromkeys(CLASSES, ["t0", "t1"])
    test = easy_task(CLASSES, 6, seed=4)[0]
    ours, theirs = learner.predict(test), whole.predict(test)
    assert ours.labels == theirs.labels and ours.tasks[0] == "t0"
    torch.testing.assert_close(ours.probabilities, theirs.probabilities, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.similarities, theirs.similarities, rtol=0, atol=1e-5)
    once = grown(early)
    assert not torch.allclose(once.predict(test).similarities, theirs.similarities, atol=1e-3)


def test_the_order_in_which_a_class_grew_changes_no_bit():
    learner = grown(*parts())
    turned = learner.copy()
    turned.memory = Memory(learner.memory.tasks[::-1])
    test = easy_task(CLASSES, 6, seed=4)[0]
    assert torch.equal(learner.predict(test).scores, turned.predict(test).scores)


def test_several_sketches_of_a_class_have_the_moments_of_its_images():
    draw = torch.Generator().manual_seed(0)
    clouds = [torch.randn(n, DIM, generator=draw) + k for k, n in enumerate([60, 9, 50, 7])]
    labels = torch.tensor([0, 1, 0, 2])
    sketches = [summarise_class(cloud) for cloud in clouds]
    space = ClassStatistics.of(sketches, labels)
    units = [torch.nn.functional.normalize(cloud.double(), dim=1) for cloud in clouds]
    images = [torch.cat([units[0], units[2]]), units[1], units[3]]
    assert space.sizes.tolist() == [110, 9, 7] and space.dof == 110 + 9 + 7 - 3
    means = torch.stack([part.mean(dim=0) for part in images])
    torch.testing.assert_close(space.means, means, atol=3e-3, rtol=0)
    scatter = sum((part - mean).T @ (part - mean) for part, mean in zip(images, means, strict=True))
    torch.testing.assert_close(space.scatter.diagonal(), scatter.diagonal(), rtol=0.02, atol=0.05)
    # Some images as they are of each large sketch, and all of the small ones.
    assert space.owners[space.loo_rows].bincount().tolist() == [2 * EXACT_PROTOTYPES, 9, 7]


def test_what_is_left_out_of_one_sketch_leaves_the_others_of_its_class():
    """The similarity to a class without an image, against the same class made without it."""
    draw = torch.Generator().manual_seed(1)
    sketches = [summarise_class(torch.randn(5, DIM, generator=draw)) for _ in range(3)]
    labels = torch.tensor([0, 1, 0])
    coarse = CoarseScorer(sketches, labels)
    _, similarity = coarse.loo_scores()
    points, means = coarse.statistics.points.double(), coarse.statistics.means
    for i, row in enumerate(coarse.statistics.loo_rows.tolist()):
        owner = int(coarse.statistics.owners[row])
        others = (coarse.statistics.owners == owner).nonzero()[:, 0]
        mean = points[others[others != row]].mean(dim=0)
        plain = torch.cosine_similarity(points[row], mean, dim=0)
        whitened = coarse.whitened[0].loo_scores()[i, owner]
        torch.testing.assert_close(similarity[i, owner], (plain + whitened) / 2)
        assert not torch.allclose(mean, means[owner])


def test_candidates_among_very_many_classes_are_scored_as_among_all(monkeypatch):
    learner = many()
    first, last = learner.memory.tasks[0], learner.memory.tasks[-1]
    both = dataclasses.replace(last, classes=ClassTable.concatenate([last.classes, first.classes[:5]]))
    learner.memory.replace(last, both)
    assert len(learner.classes) == 200 and len(learner.memory.records) == 205
    monkeypatch.setitem(RULES, "evidence", EvidenceRule(CandidateOptions(min_classes=100)))
    images = near(learner)

    def embed(rows, tasks):
        return images[rows] if tasks is None else images[rows] + 0.1 + 0.05 * (tasks[:, None] % 3)

    some = learner.match(embed, len(images), every=False)
    every = learner.match(embed, len(images))
    assert torch.equal(some.candidates, every.candidates) and some.candidates[:, -1].any()
    assert some.class_ids is not None
    torch.testing.assert_close(some.scores, every.scores.gather(1, some.class_ids), rtol=0, atol=1e-4)


def test_forgetting_a_class_forgets_all_its_records(tmp_path):
    early, late = parts()
    learner = grown(early, late)
    outcome = learner.forget("bee")
    assert outcome.tasks == ["t0", "t1"] and outcome.exact and learner.classes == ["ant", "cat"]
    without = [
        (images[[label != "bee" for label in labels]], [label for label in labels if label != "bee"])
        for images, labels in (early, late)
    ]
    test = easy_task(CLASSES, 6, seed=4)[0]
    assert torch.equal(learner.predict(test).scores, grown(*without).predict(test).scores)


def test_forgetting_a_task_leaves_what_its_classes_were_before(tmp_path):
    early, late = parts()
    learner = grown(early, late)
    assert learner.forget(task="t1").exact and file_bytes(learner, tmp_path) == file_bytes(grown(early), tmp_path)


def test_a_class_that_grew_leaves_each_prompt_that_it_helped_to_train():
    early, late = parts()
    learner = grown(early, late, settings=QUICK)
    told = learner.forget("bee")
    assert not told.exact
    assert all(f"the prompt of task '{name}' was trained with its images" in told.guarantee for name in ("t0", "t1"))


def test_what_two_models_know_of_a_class_adds_up():
    early, late = parts()
    mine, theirs = grown(early), Learner(tiny_backbone(), INSTANT)
    theirs.learn(late, name="t1")
    test = easy_task(CLASSES, 6, seed=4)[0]
    assert torch.equal(merge(mine, theirs).predict(test).scores, grown(early, late).predict(test).scores)
    apart = merge(mine, theirs, renames={"bee": "wasp"})
    assert apart.classes == [*CLASSES, "wasp"]


def test_a_prompt_is_not_trained_against_the_prototypes_of_its_own_classes(monkeypatch):
    early, late = parts()
    learner = grown(early, settings=QUICK)
    given = []
    original = trainer.train_prompt
    monkeypatch.setattr("protosteer.paper.task.train_prompt", lambda *words: given.append(words[5]) or original(*words))
    images, labels = late
    keep = [label != "bee" for label in labels]
    learner.learn((images[keep], [label for label in labels if label != "bee"]), name="t1")
    means = learner.memory.tasks[0].classes[1].values.means  # bee alone is a stranger
    assert torch.equal(given[0].means, means) and given[0].labels.tolist() == [0] * len(means)


def test_evidence_grows_without_training_and_the_papers_rule_with_it():
    early, late = parts()
    assert grown(early, late, settings=QUICK).memory.tasks[1].prompt is not None
    by_evidence = grown(early, late, settings=QUICK.replace(rule="evidence"))
    assert by_evidence.memory.tasks[0].prompt is not None and by_evidence.memory.tasks[1].prompt is None
    alone = QUICK.replace(rule="evidence", independent=True)
    assert grown(early, late, settings=alone).memory.tasks[1].prompt is not None  # whatever was there before


def test_singles_of_many_sketches_are_those_of_each():
    counts = [[1, 1, 1], [4], [1] * 12 + [3, 3], [1, 2, 1], [1] * 10 + [5, 1], [2, 1]]
    sketches = [ClassSummary(torch.eye(len(c)), torch.tensor(c), torch.zeros(len(c))) for c in counts]
    lengths = torch.tensor([len(c) for c in counts])
    bulk = SummaryTable(torch.empty(0), torch.tensor(sum(counts, [])), torch.empty(0), lengths)
    assert bulk.num_exact.tolist() == [s.num_exact for s in sketches] == [3, 0, 10, 1, 10, 0]


def test_deviations_of_a_part_count_for_its_own_images():
    points = torch.eye(2)[:1]
    wide = ClassSummary(points, torch.tensor([30]), torch.tensor([0.2, 0.0]))
    narrow = ClassSummary(points, torch.tensor([10]), torch.tensor([0.0, 0.1]))
    space = ClassStatistics.of([wide, narrow], torch.tensor([0, 0]))
    expected = torch.diag(torch.tensor([30 * 0.2**2, 10 * 0.1**2]).double())
    torch.testing.assert_close(space.scatter, expected, atol=1e-6, rtol=0)
