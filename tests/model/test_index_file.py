from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from conftest import tiny_backbone
from many_toys import DIM, many
from protosteer.errors import ProtosteerWarning
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model import index_file
from protosteer.model.unlearning import forget
from protosteer.search import candidates, ivf
from protosteer.search.ivf import Partition, digests
from protosteer.util.tensor_file import pack_tensors, unpack_tensors

pytestmark = pytest.mark.slow


pytest.importorskip("faiss", reason="faiss is not installed")


@pytest.fixture
def learner(monkeypatch) -> Learner:
    monkeypatch.setattr(candidates, "FROM", 100)
    monkeypatch.setattr(ivf, "LISTS_FROM", 100)
    return many()


@pytest.fixture
def saved(learner, tmp_path):
    assert learner.shortlist
    path = tmp_path / "many.protosteer"
    learner.save(path)
    assert index_file.beside(path).is_file()
    return path


def test_an_index_is_read_again_and_nothing_is_made_anew(learner, saved, monkeypatch):
    monkeypatch.setattr(Partition, "fit", None)  # would be an error
    again = Learner.load(saved, backbone=tiny_backbone())
    mine, theirs = learner.shortlist, again.shortlist
    assert torch.equal(mine.partition.lists, theirs.partition.lists)
    queries = F.normalize(torch.randn(20, DIM, generator=torch.Generator().manual_seed(1)), dim=1)
    assert torch.equal(mine.search.nearest(queries, 8), theirs.search.nearest(queries, 8))


def test_no_shortlist_no_index(learner, tmp_path):
    learner.save(tmp_path / "many.protosteer")
    assert [path.name for path in tmp_path.iterdir()] == ["many.protosteer"]


def test_what_was_forgotten_leaves_the_index_when_the_model_is_written(learner, saved):
    model = model_file.read(saved)  # no backbone, as the command `forget` has none
    forget(model.memory, "class-3-4")
    model.write(saved)
    kept = index_file.read(saved)
    assert int(digests(["class-3-4"])) not in kept.digests and len(kept.digests) == 199 and kept.changed == 1
    again = Learner.load(saved, backbone=tiny_backbone())
    assert torch.equal(again.shortlist.partition.centroids, kept.centroids)


def damaged(path, how):
    data = path.read_bytes()
    header, tensors = unpack_tensors(data, "index")
    if how == "truncated":
        return data[: len(data) // 2]
    if how == "altered":
        return data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]
    if how == "empty":
        return b""
    if how == "of another backbone":
        header["backbone"] = "other"
    elif how == "of a later version":
        header["index"] = 2
    elif how == "a list that is not there":
        tensors["lists"][0] = 10**6
    elif how == "a list before the first":
        tensors["lists"][0] = -1
    elif how == "not finite":
        tensors["centroids"][0, 0] = torch.nan
    elif how == "no classes":
        tensors = {name: t[:0] if name != "centroids" else t for name, t in tensors.items()}
    elif how == "too few lists":
        tensors["lists"] = tensors["lists"][:-1].clone()
    elif how == "incomplete":
        del tensors["digests"]
    return pack_tensors(header, tensors)


HOWS = [
    "truncated",
    "altered",
    "empty",
    "of another backbone",
    "of a later version",
    "not finite",
    "incomplete",
]
HOWS += ["a list that is not there", "a list before the first", "no classes", "too few lists"]


@pytest.mark.parametrize("how", HOWS)
def test_an_index_that_cannot_be_used_is_one_line_and_made_anew(learner, saved, how):
    path = index_file.beside(saved)
    path.write_bytes(damaged(path, how))
    with pytest.warns(ProtosteerWarning, match="many.protosteer.index is not used .*made anew") as caught:
        again = Learner.load(saved, backbone=tiny_backbone())
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    assert torch.equal(again.shortlist.partition.lists, learner.shortlist.partition.lists)


def test_a_pipe_in_its_place_is_not_waited_for(saved):
    path = index_file.beside(saved)
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(ProtosteerWarning, match="not a regular file"):
        Learner.load(saved, backbone=tiny_backbone())


def test_centroids_of_another_width_are_made_anew(learner, saved):
    old = index_file.read(saved)
    narrow = Partition(old.digests, old.lists, old.centroids[:, :3].contiguous())
    index_file.write(saved, narrow, learner.backbone.fingerprint)
    again = Learner.load(saved, backbone=tiny_backbone())
    assert again.shortlist.partition.centroids.shape[1] == DIM


def test_lies_about_lists_cost_candidates_and_nothing_else(learner, saved):
    """All in one list, about a centroid far from them: found are still classes, and they are scored truly."""
    old = index_file.read(saved)
    lie = Partition(old.digests, torch.zeros_like(old.lists), old.centroids)
    index_file.write(saved, lie, learner.backbone.fingerprint)
    again = Learner.load(saved, backbone=tiny_backbone())
    seen = torch.randn(5, DIM, generator=torch.Generator().manual_seed(1))
    everything = again.match(lambda rows, _: seen[rows], 5)
    some = again.match(lambda rows, _: seen[rows], 5, every=False)
    assert some.columns.shape == (5, candidates.CANDIDATES) and int(some.columns.max()) < 200
    untried = ~(some.candidates | everything.candidates).any(dim=1)
    expected = everything.scores.gather(1, some.columns)
    assert torch.allclose(some.scores[untried], expected[untried], atol=1e-4)


def test_without_faiss_all_classes_are_looked_at(learner, saved, monkeypatch):
    monkeypatch.setattr(ivf, "available", lambda: False)
    again = Learner.load(saved, backbone=tiny_backbone())
    assert isinstance(again.shortlist.search, ivf.Everywhere)
    seen = torch.randn(5, DIM, generator=torch.Generator().manual_seed(1))
    assert again.match(lambda rows, _: seen[rows], 5, every=False).columns is not None
