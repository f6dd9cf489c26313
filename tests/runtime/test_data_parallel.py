"""Several ranks compute what one process computes: embeddings, losses, gradients, prompts."""

from pathlib import Path

import pytest
import rank_cases
import torch
from rank_cases import METHODS, STEPS, Case
from torch import Tensor

from rank_toys import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    rank_cases.write_images(made)
    return made


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, Case]:
    """The results of this process alone."""
    return rank_cases.all_cases(folder)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Case]]:
    """The results of every rank."""
    for code, _, messages in run_ranks(request.param, Path(rank_cases.__file__), folder):
        assert code == 0, messages
    return [torch.load(folder / f"{request.param}-{rank}.pt") for rank in range(request.param)]


def same(ranks: list[dict[str, Case]], case: str) -> Case:
    """The results of a case, which must be bit-identical on all ranks."""
    for other in ranks[1:]:
        for name, value in ranks[0][case].items():
            assert torch.equal(value, other[case][name]), (case, name)
    return ranks[0][case]


@pytest.mark.parametrize("count", [count for count, *_ in STEPS])
@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-10), ("float32", 1e-5)])
def test_a_step_is_that_of_one_process(
    ranks: list[dict[str, Case]], single: dict[str, Case], count: int, dtype: str, close: float
) -> None:
    case = f"step {dtype} {count}"
    found, expected = same(ranks, case), single[case]
    assert len(found["embeddings"]) == count and found.keys() == expected.keys()
    for name, value in expected.items():
        error, greatest = (found[name] - value).abs().max(), value.abs().max()
        assert value.dtype == rank_cases.DTYPES[dtype] and greatest > 0
        assert error <= close * greatest, f"{name}: {error} of {greatest}"


def test_a_training_ends_in_the_same_prompt(ranks: list[dict[str, Case]], single: dict[str, Case]) -> None:
    expected: dict[str, Tensor] = single["training"]
    torch.testing.assert_close(same(ranks, "training"), expected, atol=1e-4, rtol=0)
    assert (rank_cases.training(seed=4)["prompt"] - expected["prompt"]).abs().max() > 1e-3


def test_every_rank_has_all_embeddings(ranks: list[dict[str, Case]], single: dict[str, Case]) -> None:
    torch.testing.assert_close(same(ranks, "embeddings"), single["embeddings"], atol=1e-5, rtol=0)


def test_a_learner_learns_the_same(ranks: list[dict[str, Case]], single: dict[str, Case]) -> None:
    torch.testing.assert_close(same(ranks, "learned"), single["learned"], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_the_common_loop_learn_as_in_one_process(
    name: str, ranks: list[dict[str, Case]], single: dict[str, Case]
) -> None:
    found, expected = same(ranks, name), single[name]
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-3, rtol=1e-3, msg=f"{name}: {key}")


@pytest.mark.parametrize("kind", ["none", "one", "each", "prefix"])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_shared_rows_have_the_gradients_of_one_process(
    count: int, kind: str, ranks: list[dict[str, Case]], single: dict[str, Case]
) -> None:
    found, expected = same(ranks, f"rows {count} {kind}"), single[f"rows {count} {kind}"]
    assert found.keys() == expected.keys() and len(found) > 10
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-10, rtol=1e-10, msg=key)
