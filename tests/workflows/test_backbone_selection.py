"""The backbone that suits a user's images: which are tried, on what, by which rule, and what is fetched."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conftest import easy_task, tiny_backbone
from expect import expect_error
from photo_toys import photos
from protosteer.backbones import BackboneInfo, auto_candidates
from protosteer.backbones.auto_candidates import candidates_on_disk
from protosteer.backbones.build_vit import multiply_adds
from protosteer.backbones.registry import BASE, KNOWN, SMALL
from protosteer.errors import DataError
from protosteer.evidence.prototype_summary import MAX_PROTOTYPES, summarise_class
from protosteer.evidence.scorer import CoarseScorer
from protosteer.util.files import cache_dir
from protosteer.workflows import backbone_selection
from protosteer.workflows.backbone_selection import (
    Trial,
    affordable,
    choose_backbone,
    count_loo_correct,
    sample,
    select_trial,
)
from vit_toys import small
from weight_toys import OWN, hub_config, tiny_weights
from weight_toys import empty_caches as empty_caches  # a fixture for every test here

MINI, NANO = KNOWN[:2]
CLASSES = ["ant", "bee", "cat"]


def by_hand(name: str = "mine") -> Path:
    """A file that a user put where weights are looked for."""
    return tiny_weights(cache_dir() / "weights" / f"{name}.safetensors", OWN)


def info(name: str, size: int = 224) -> BackboneInfo:
    return BackboneInfo(name, name, "Apache-2.0", replace(SMALL, image_size=size))


# What is tried


def test_what_is_on_disk_is_known_before_it_is_loaded() -> None:
    path = by_hand()
    (path.parent / "shop.safetensors").write_bytes(b"no weights")
    tiny_weights(path.parent / "untold.safetensors", {"heads": 3})
    (path.parent / "half.pth.part").touch()
    found, refused = candidates_on_disk()
    assert [one.name for one in found] == ["nano", "mine"]
    assert (found[1].licence, found[1].config.image_size, found[1].path) == ("Apache-2.0", 16, path)
    assert found[1].parameters == tiny_backbone().parameters
    assert set(refused) == {"shop", "untold"} and "mean= and std=" in refused["untold"]


def test_nano_is_too_small_to_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_candidates, "TOO_SMALL", NANO.name)  # as it is outside of tests
    assert [one.name for one in candidates_on_disk()[0]] == [MINI.name]


def test_plain_vits_in_the_cache_of_the_hub_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, held = tmp_path / "hub", tmp_path / "held"
    for name in ("models--timm--vit_any.tag", "models--timm--resnet18.tag", "models--other--vit_any"):
        (hub / name).mkdir(parents=True)
    tiny_weights(held / "model.safetensors")
    (held / "config.json").write_text(hub_config())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))

    def cached(repo: str, file: str) -> str | None:
        return str(held / file) if "any" in repo else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    assert [(one.name, one.licence) for one in candidates_on_disk()[0]][1:] == [("vit_any.tag", "not stated")]


def test_time_and_memory_decide_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = 60 * 15e9 / backbone_selection.LEAST  # operations per image that one thread does for the least in a minute
    assert multiply_adds(NANO.config) + multiply_adds(BASE) < fits < multiply_adds(SMALL) + multiply_adds(BASE) + 1e6
    large = BackboneInfo("large", "large", "", BASE)
    left_out: dict[str, str] = {}
    assert affordable([large, info("s"), NANO], 1000, 15e9, left_out) == [NANO, info("s")]
    assert list(left_out) == ["large"] and "too slow" in left_out["large"]
    assert affordable([large, info("s"), NANO], 1000, 30e9, {}) == [NANO, info("s"), large]
    assert affordable([large, info("s"), NANO], 30, 15e9, {}) == [NANO, info("s"), large]  # few images
    assert affordable([info("s")], 1000, 15e9, {}, [NANO, large]) == [NANO, large]  # those on disk go first
    monkeypatch.setattr(backbone_selection, "memory_size", lambda: 500e6)
    assert affordable([large, info("s"), NANO], 1000, 1e12, left_out) == [NANO, info("s")]
    assert "memory" in left_out["large"]


# On what


def test_a_sample_is_even_bounded_and_the_same_for_the_same_seed() -> None:
    labels = ["a"] * 300 + ["b"] * 20 + ["c"] * 3
    rows = sample(labels, 60)
    assert [sum(labels[row] == name for row in rows) for name in "abc"] == [20, 20, 3]
    assert rows == sorted(set(rows)) == sample(labels, 60) != sample(labels, 60, seed=1)
    assert (
        len(sample(["a"] * 300 + ["b"] * 300, 1000)) == 2 * MAX_PROTOTYPES
    )  # what a class is sketched by, image for image
    many = [str(i % 100) for i in range(1000)]
    some = [many[row] for row in sample(many, 60)]
    assert len(set(some)) == 12 and all(some.count(name) == 5 for name in some)


def test_left_out_accuracy_equals_learning_without_each_image() -> None:
    """The ridge is exact; whitening keeps shrinkage and centre, which hardly moves one image of many."""
    torch.manual_seed(0)
    centres = torch.randn(3, 6)
    labels = [name for name in CLASSES for _ in range(20)]
    embeddings = torch.cat([centre + 1.2 * torch.randn(20, 6) for centre in centres])
    right = 0
    for row, label in enumerate(labels):
        others = [i for i in range(len(labels)) if i != row]
        groups = [embeddings[[i for i in others if labels[i] == name]] for name in CLASSES]
        scores, _ = CoarseScorer([summarise_class(group) for group in groups]).scores(embeddings[row : row + 1])
        right += CLASSES[int(scores.argmax())] == label
    found, of = count_loo_correct(embeddings, labels)
    assert of == 60 and 30 < right < 58 and abs(found - right) <= 1


# By which rule


def test_the_least_costly_within_a_standard_error_of_the_best_is_chosen() -> None:
    def trial(size: int, right: int) -> Trial:
        return Trial(info(str(size), size), right, 400, 1.0)

    assert trial(224, 360).standard_error == pytest.approx(1.5, abs=0.03)
    assert 0 < trial(224, 400).standard_error < 0.5
    assert select_trial([trial(32, 200), trial(112, 355), trial(224, 360)]).info.name == "112"
    assert select_trial([trial(32, 200), trial(112, 353), trial(224, 360)]).info.name == "224"
    assert select_trial([trial(32, 400), trial(224, 400)]).info.name == "32"
    slower = replace(trial(112, 355), images_per_second=1e-3)
    assert select_trial([slower, trial(224, 360)]).info.name == "112"  # seconds decide nothing


# The whole


def test_with_nano_alone_nothing_is_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone_selection, "_try", lambda *_: pytest.fail("it was tried"))
    choice = choose_backbone(photos(tmp_path / "photos", CLASSES))
    assert choice.info.name == "nano" and not choice.trials and not choice.left_out
    assert choice.load().name == "nano"


@pytest.mark.parametrize("kind", ["folder", "pair", "dataset"])
def test_all_on_disk_are_tried_on_what_a_learner_learns_from(kind: str, tmp_path: Path) -> None:
    by_hand()
    by_hand("vit_broken").write_bytes(b"no weights")
    data: Any = photos(tmp_path / "photos", CLASSES)
    if kind == "pair":
        data = easy_task(CLASSES, 8, 0)
    if kind == "dataset":
        data = list_dataset(*easy_task(CLASSES, 8, 0))
    stages: list[str] = []
    choice = choose_backbone(data, on_stage=lambda stage: stages.append(stage.doing))
    assert [trial.info.name for trial in choice.trials] == ["mine", "nano"]  # the smallest first
    assert all(trial.images == 24 and trial.images_per_second > 0 for trial in choice.trials)
    assert choice.info == select_trial(choice.trials).info and choice.load().name == choice.info.name
    assert list(choice.left_out) == ["vit_broken"] and set(stages) == {"trying mine", "trying nano"}
    again = choose_backbone(data)
    assert [(t.info, t.right) for t in again.trials] == [(t.info, t.right) for t in choice.trials]


class list_dataset:
    def __init__(self, images: torch.Tensor, labels: list[str]):
        self.items, self.targets = list(zip(images, labels, strict=True)), labels

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, str]:
        return self.items[row]


def test_where_nothing_can_be_compared_the_largest_on_disk_is_taken(tmp_path: Path) -> None:
    weights = small(depth=3).vit.state_dict()
    by_hand()
    save_file(weights, cache_dir() / "weights" / "deit_deep.safetensors")
    (cache_dir() / "weights" / "deit_deep.json").write_text(hub_config())
    costs = {one.name: multiply_adds(one.config) for one in candidates_on_disk()[0]}
    for classes, per_class in ((["ant"], 8), (CLASSES, 1)):
        choice = choose_backbone(photos(tmp_path / str(per_class), classes, per_class))
        assert not choice.trials and costs[choice.info.name] == max(costs.values())
    with expect_error("no-images", DataError):
        choose_backbone((torch.zeros(0, 3, 8, 8, dtype=torch.uint8), []))


# The network


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The user has not forbidden it; gives what was asked of the hub. Toys are known under the short names."""
    toys = tuple(replace(one, config=small().vit.config) if one.worth_fetching else one for one in KNOWN)
    monkeypatch.setattr("protosteer.backbones.registry.KNOWN", toys)
    monkeypatch.setattr("protosteer.backbones.auto_candidates.KNOWN", toys)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda api, repo, **_: asked.append(repo))
    return asked


def test_a_few_small_ones_are_fetched_and_that_is_said_before(
    online: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def download(repo: str, file: str) -> str:
        assert len(said) == len(online)  # said before anything is asked
        path = tmp_path / repo / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(hub_config())
        if path.suffix == ".safetensors":
            save_file(small().vit.state_dict(), path)
        return str(path)

    def cached(repo: str, file: str) -> str | None:
        path = tmp_path / repo / file
        return str(path) if path.is_file() else None

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    folder = photos(tmp_path / "photos", CLASSES)
    assert choose_backbone(folder, say=said.append).info.name == "nano"
    assert not said and not online  # only if it is asked for
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert choose_backbone(folder, fetch=True, say=said.append).info.name == "nano"
    assert not said and not online  # nor where the user has forbidden it
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    choice = choose_backbone(folder, fetch=True, say=said.append)
    assert sorted(trial.info.alias for trial in choice.trials) == ["dinov2-small", "nano", "vit-small", "vit-tiny"]
    assert len(said) == 3 and all("Apache-2.0" in line and " MB" in line for line in said)
    again = choose_backbone(folder, fetch=True, say=said.append)
    assert len(said) == len(online) == 3  # they are on the disk now
    assert [(t.info.name, t.right) for t in again.trials] == [(t.info.name, t.right) for t in choice.trials]


def test_what_cannot_be_fetched_leaves_what_is_on_disk(online: list[str], tmp_path: Path) -> None:
    by_hand()
    said: list[str] = []
    choice = choose_backbone(photos(tmp_path / "photos", CLASSES), fetch=True, say=said.append)
    assert sorted(trial.info.name for trial in choice.trials) == ["mine", "nano"]
    assert len(online) == 1 and len(said) == 2  # no second attempt
    assert said[1] == "vit-tiny cannot be fetched (ConnectionError); only what is on this disk is tried"


def test_nothing_is_fetched_that_this_machine_is_too_slow_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(backbone_selection, "CPU_SPEED", 1e9)
    folder, said = photos(tmp_path / "photos", CLASSES, per_class=20), []
    choice = choose_backbone(folder, fetch=True, say=said.append)
    assert choice.info.name == "nano" and not said
    assert set(choice.left_out) == {"vit-tiny", "vit-small", "dinov2-small"}
