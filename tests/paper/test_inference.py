"""Batched two-stage inference against a naive twin that treats one image at a time."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from protosteer.model.class_table import ClassTable
from protosteer.model.index import Index
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskRecord
from protosteer.paper.inference import Matches, match
from protosteer.paper.prototypes import Centroids
from protosteer.prediction import Prediction
from protosteer.tasks import nearest_task

DIM, IMAGES = 6, 40


def memory(tasks: int = 4, prompts: bool = True, seed: int = 0) -> Memory:
    generator = torch.Generator().manual_seed(seed)

    def record(name: str, count: int) -> ClassRecord:
        means = torch.randn(count, DIM, generator=generator)
        values = Centroids(means, torch.zeros(count, DIM), torch.ones(count, dtype=torch.int64))
        return ClassRecord(name, torch.randn(count + 1, DIM, generator=generator), values)

    return Memory(
        TaskRecord(
            f"t{t}",
            ClassTable.of(record(f"c{t}{k}", 1 + (t + k) % 3) for k in range(1 + t % 3)),
            torch.full((2, 1, DIM), float(t)) if prompts else None,
        )
        for t in range(tasks)
    )


def mixed(seed: int = 0) -> Memory:
    """As a model becomes in use: t0 and t3 have prompts of their own, t1 and t5 none, t2, t4, t6 copies."""
    original = [0, None, 0, 3, 3, None, 0]
    return Memory(
        dataclasses.replace(
            task,
            prompt=None if own is None else torch.full((2, 1, DIM), float(own)),
            few_shot=own not in (None, t),
        )
        for t, (task, own) in enumerate(zip(memory(7, seed=seed).tasks, original, strict=True))
    )


def embedder(seed: int = 1):
    """Stands for the backbone: fixed embeddings of every image under every prompt."""
    table = torch.randn(8, IMAGES, DIM, generator=torch.Generator().manual_seed(seed))
    return lambda rows, tasks: table[torch.full_like(rows, -1) if tasks is None else tasks, rows]


class ByPrompt:
    """The same by what is in the prompt, so that a copy embeds as its original does; counts requests."""

    def __init__(self, mem: Memory):
        self.prompts = [None if task.prompt is None else int(task.prompt[0, 0, 0]) for task in mem.tasks]
        self.plain, self.passes = embedder(), 0

    def __call__(self, rows, tasks):
        self.passes += len(rows)
        return self.plain(
            rows, None if tasks is None else torch.tensor([self.prompts[t] for t in tasks.tolist()])
        )


def naive(mem: Memory, embed, row: int, neighbours: int) -> tuple[str, dict[str, float], set[str]]:
    """METHOD's four steps for one image."""

    def cosine(a, b):
        return float(F.cosine_similarity(a, b, dim=0))

    one = torch.tensor([row])
    q = embed(one, None)[0]
    keys = [(cosine(q, k), t) for t, task in enumerate(mem.tasks) for c in task.classes for k in c.keys]
    nearest = sorted(keys, reverse=True)[:neighbours]
    retrieved = {t for _, t in nearest}
    scores = dict.fromkeys(mem.classes, -2.0)
    for t in retrieved:
        q_t = q if mem.tasks[t].prompt is None else embed(one, torch.tensor([t]))[0]
        for task in mem.tasks:
            for c in task.classes:
                for value in c.values.means:
                    scores[c.name] = max(scores[c.name], cosine(q_t, value))
    return max(scores, key=scores.__getitem__), scores, {mem.tasks[t].name for t in retrieved}


@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.parametrize("neighbours", [1, 3, 100])
def test_equals_a_naive_twin(prompts, neighbours):
    mem, embed = memory(prompts=prompts), embedder()
    index = Index.build(mem)
    prediction = Prediction.build(index, match(index.prototypes, embed, IMAGES, neighbours), 0.6)
    for row in range(IMAGES):
        label, scores, retrieved = naive(mem, embed, row, neighbours)
        assert prediction.labels[row] == label
        assert prediction.scores[row].tolist() == pytest.approx([scores[c] for c in mem.classes], abs=1e-5)
        assert set(prediction.candidates[row]) == retrieved
        assert label in mem.tasks[mem.task_names.index(prediction.tasks[row])].class_names


def test_forward_passes_are_one_per_image_and_one_per_candidate():
    mem = memory()
    index = Index.build(mem)
    matches = match(index.prototypes, embedder(), IMAGES, 3)
    assert int(matches.passes.sum()) == IMAGES + int(matches.candidates.sum())


@pytest.mark.parametrize("neighbours", [1, 3, 6, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_copied_prompts_and_none_beside_each_other_equal_a_naive_twin(neighbours, seed):
    """The twin runs every candidate's prompt; the batched form each prompt once, with the same outcome."""
    mem = mixed(seed)
    index, embed = Index.build(mem), ByPrompt(mem)
    assert index.prompt_owners.tolist() == [0, 1, 0, 3, 3, 5, 0]
    matches = match(index.prototypes, embed, IMAGES, neighbours)
    passes, expected = embed.passes, IMAGES
    prediction = Prediction.build(index, matches, 0.6)
    for row in range(IMAGES):
        label, scores, retrieved = naive(mem, embed, row, neighbours)
        assert prediction.labels[row] == label and set(prediction.candidates[row]) == retrieved
        assert prediction.scores[row].tolist() == pytest.approx([scores[c] for c in mem.classes], abs=1e-5)
        tried = matches.candidates[row].nonzero()[:, 0].tolist()
        expected += len({embed.prompts[t] for t in tried} - {None})
        seen = {
            t: embed(torch.tensor([row]), torch.tensor([t]) if mem.tasks[t].prompt is not None else None)
            for t in tried
        }
        best = {t: float((F.normalize(q, dim=1) @ index.values.T).max()) for t, q in seen.items()}
        winner = max(best, key=best.__getitem__)
        assert embed.prompts[int(matches.winners[row])] == embed.prompts[winner]
        assert torch.equal(matches.embeddings[row], seen[winner][0])
        assert torch.equal(prediction.embeddings[row], matches.embeddings[row])
    assert int(matches.passes.sum()) == passes == expected


def test_one_prompt_is_tried_once_however_many_have_it():
    mem = mixed()
    index, embed = Index.build(mem), ByPrompt(mem)
    assert int(match(index.prototypes, embed, IMAGES, 100).passes.sum()) == 3 * IMAGES == embed.passes


def test_two_tasks_that_happen_to_be_equal_are_no_copies_unless_something_is_few_shot():
    """Looking for copies costs a checksum of every prompt, which most models need not pay."""
    plain = Memory(dataclasses.replace(task, few_shot=False) for task in mixed().tasks)
    assert Index.build(plain).prompt_owners.tolist() == list(range(7))


def test_joined_matches_are_those_of_the_parts():
    index, embed = Index.build(mixed()), ByPrompt(mixed())
    whole = match(index.prototypes, embed, IMAGES, 3)
    parts = [
        match(index.prototypes, lambda r, t, s=s: embed(r + s, t), IMAGES // 2, 3) for s in (0, IMAGES // 2)
    ]
    joined = Matches.join(parts)
    for field in dataclasses.fields(Matches):
        one, other = getattr(joined, field.name), getattr(whole, field.name)
        torch.testing.assert_close(one.float(), other.float(), atol=1e-6, rtol=0)


def test_the_nearest_task_is_that_of_the_most_similar_keys_on_average():
    mem = mixed()
    index = Index.build(mem)
    for seed in range(20):
        queries = torch.randn(3, DIM, generator=torch.Generator().manual_seed(seed))
        own = []
        for task in mem.tasks:
            keys = torch.cat([c.keys for c in task.classes])
            own.append(float(F.cosine_similarity(queries[:, None], keys[None], dim=2).amax(dim=1).mean()))
        assert nearest_task(index.prototypes, queries) == max(range(len(own)), key=own.__getitem__)


def test_without_prompts_only_the_coarse_pass_is_made():
    index = Index.build(memory(prompts=False))
    assert int(match(index.prototypes, embedder(), IMAGES, 3).passes.sum()) == IMAGES


def test_winner_is_the_prompt_of_the_best_match():
    mem, embed = memory(), embedder()
    index = Index.build(mem)
    matches = match(index.prototypes, embed, IMAGES, 5)
    for row in range(IMAGES):
        best = {}
        for t in matches.candidates[row].nonzero()[:, 0].tolist():
            q = F.normalize(embed(torch.tensor([row]), torch.tensor([t])), dim=1)
            best[t] = float((q @ index.values.T).max())
        assert int(matches.winners[row]) == max(best, key=best.__getitem__)


def test_probabilities_and_energy():
    index = Index.build(memory())
    prediction = Prediction.build(index, match(index.prototypes, embedder(), IMAGES, 3), 0.6)
    expected = torch.exp(prediction.scores / 0.6)
    torch.testing.assert_close(prediction.probabilities, expected / expected.sum(dim=1, keepdim=True))
    torch.testing.assert_close(prediction.energy, -0.6 * expected.sum(dim=1).log())


@pytest.mark.parametrize("top", [1, 3, 99])
def test_the_label_ranks_first_also_where_all_are_as_similar(top):
    index = Index.build(memory())
    matches = match(index.prototypes, embedder(), IMAGES, 3)
    prediction = Prediction.build(index, matches, 0.6)
    same = torch.ones_like(matches.scores)
    tied = Prediction.build(index, dataclasses.replace(matches, scores=same), 0.6)
    for one in (prediction, tied):
        for row, ranking in enumerate(one.ranked(top)):
            names, probabilities, similarities = zip(*ranking, strict=True)
            places = [one.classes.index(name) for name in names]
            assert len(set(names)) == len(names) == min(top, len(one.classes)) and names[0] == one.labels[row]
            assert list(probabilities) == one.probabilities[row, places].tolist()
            assert (
                list(similarities) == one.scores[row, places].tolist() == sorted(similarities, reverse=True)
            )


def test_a_prediction_does_not_depend_on_its_batch():
    index, embed = Index.build(memory()), embedder()
    together = match(index.prototypes, embed, IMAGES, 3)
    for row in (0, 7, 39):
        alone = match(index.prototypes, lambda rows, tasks, row=row: embed(rows + row, tasks), 1, 3)
        torch.testing.assert_close(alone.scores[0], together.scores[row])
        assert torch.equal(alone.candidates[0], together.candidates[row])
