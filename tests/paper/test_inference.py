"""Algorithm 2 in batches against a naive twin that treats one image at a time."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from protosteer.paper.inference import Matches, PrototypeIndex, match, retrieve

DIM, IMAGES, CLASSES = 6, 40, 9
OWN = [0, 1, 2, 3, 4, 5, 6]
NONE = [-1] * 7
MIXED = [0, -1, 0, 3, 3, -1, 0]  # t0 and t3 have prompts of their own, t1 and t5 none, t2, t4 and t6 copies


def index(prompt_tasks: list[int] = OWN, seed: int = 0) -> PrototypeIndex:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (F.normalize(torch.randn(n, DIM, generator=generator), dim=1) for n in (20, 24))
    return PrototypeIndex(
        keys=keys,
        key_tasks=torch.arange(20) % 7,
        values=values,
        value_classes=torch.arange(24) % CLASSES,
        prompt_tasks=torch.tensor(prompt_tasks),
        num_classes=CLASSES,
    )


class Embed:
    """Stands for the backbone: a fixed embedding of every image under every prompt; counts forward passes."""

    def __init__(self, seed: int = 1):
        self.table = torch.randn(8, IMAGES, DIM, generator=torch.Generator().manual_seed(seed))
        self.passes = 0

    def __call__(self, rows: Tensor, tasks: Tensor | None) -> Tensor:
        self.passes += len(rows)
        return self.table[torch.full_like(rows, -1) if tasks is None else tasks, rows]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a, b, dim=0))


def naive(one: PrototypeIndex, embed: Embed, row: int, neighbours: int) -> tuple[list[float], dict[int, Tensor]]:
    """METHOD's four steps for one image: the score of each class, and q_j by retrieved task."""
    q = embed.table[-1, row]
    ranked = sorted(range(len(one.keys)), key=lambda k: -cosine(q, one.keys[k]))[:neighbours]
    found = {}
    for t in {int(one.key_tasks[k]) for k in ranked}:
        prompt = int(one.prompt_tasks[t])
        found[t] = q if prompt < 0 else embed.table[prompt, row]
    scores = [-2.0] * one.num_classes
    for value, label in zip(one.values, one.value_classes.tolist(), strict=True):
        scores[label] = max(scores[label], *(cosine(q_j, value) for q_j in found.values()))
    return scores, found


@pytest.mark.parametrize("neighbours", [1, 3, 6, 100])
@pytest.mark.parametrize("prompt_tasks", [OWN, NONE, MIXED], ids=["own", "none", "mixed"])
def test_equals_a_naive_twin(prompt_tasks: list[int], neighbours: int) -> None:
    """The twin runs every candidate's prompt; the batched form each prompt once, with the same outcome."""
    one, embed, expected = index(prompt_tasks), Embed(), IMAGES
    matches = match(one, embed, IMAGES, neighbours)
    passes = embed.passes
    for row in range(IMAGES):
        scores, found = naive(one, embed, row, neighbours)
        assert matches.scores[row].tolist() == pytest.approx(scores, abs=1e-5)
        assert set(matches.candidates[row].nonzero()[:, 0].tolist()) == set(found)
        prompts = {int(one.prompt_tasks[t]) for t in found} - {-1}
        expected += len(prompts)
        assert int(matches.passes[row]) == 1 + len(prompts)
        best = {t: float((F.normalize(q, dim=0) @ one.values.T).max()) for t, q in found.items()}
        winner = max(best, key=best.__getitem__)
        assert int(one.prompt_tasks[matches.winners[row]]) == int(one.prompt_tasks[winner])
        assert torch.equal(matches.embeddings[row], found[winner])
    assert passes == expected


def test_retrieval_takes_no_more_keys_than_there_are() -> None:
    queries = torch.randn(3, DIM, generator=torch.Generator().manual_seed(0))
    assert retrieve(index(), queries, 1).sum(dim=1).tolist() == [1, 1, 1] and retrieve(index(), queries, 1000).all()


def test_joined_matches_are_those_of_the_parts() -> None:
    one, embed = index(MIXED), Embed()
    whole = match(one, embed, IMAGES, 3)
    parts = [match(one, lambda r, t, s=s: embed(r + s, t), IMAGES // 2, 3) for s in (0, IMAGES // 2)]
    for field in dataclasses.fields(Matches):
        joined, expected = getattr(Matches.join(parts), field.name), getattr(whole, field.name)
        torch.testing.assert_close(joined.float(), expected.float(), atol=1e-6, rtol=0)


def test_a_prediction_does_not_depend_on_its_batch() -> None:
    one, embed = index(), Embed()
    together = match(one, embed, IMAGES, 3)
    for row in (0, 7, 39):
        alone = match(one, lambda rows, tasks, row=row: embed(rows + row, tasks), 1, 3)
        torch.testing.assert_close(alone.scores[0], together.scores[row])
        assert torch.equal(alone.candidates[0], together.candidates[row])
