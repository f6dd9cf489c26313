"""A model file from someone else may be sealed and say anything: what is odd is refused in one line, at once."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import easy_task, tiny_backbone
from photo_toys import EVIDENCE, QUICK
from protosteer.backbones import Backbone
from protosteer.errors import DataError, ModelFileError, ProtosteerError, WeightsError
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.settings import Settings
from protosteer.util.tensor_file import pack_tensors, unpack_tensors
from protosteer.workflows import shared_prompt

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
PLACE = Path("a.protosteer")
HUGE = int("9" * 400)


def made(settings: Settings) -> bytes:
    learner = Learner(tiny_backbone(), settings)
    learner.learn(easy_task(["cat", "dog"]), name="first")
    learner.learn(easy_task(["eel", "fox"], per_class=45), name="second")
    return learner.model.pack()


@pytest.fixture(scope="module")
def paper() -> bytes:
    return made(QUICK)


@pytest.fixture(scope="module")
def evidence() -> bytes:
    return made(EVIDENCE)


def forged(data: bytes, change: Change) -> bytes:
    """The file after someone who knows the format has changed it and sealed it again."""
    header, tensors = unpack_tensors(data, "it")
    change(header, tensors)
    return pack_tensors(header, tensors)


def backbone(**changes: Any) -> Change:
    return lambda header, tensors: header["backbone"].update(changes)


def without(key: str) -> Change:
    return lambda header, tensors: header["backbone"].pop(key)


def how(**changes: Any) -> Change:
    return lambda header, tensors: header["backbone"]["preprocessing"].update(changes)


def task(**changes: Any) -> Change:
    return lambda header, tensors: header["tasks"][0].update(changes)


def about(**changes: Any) -> Change:
    return lambda header, tensors: header["tasks"][0]["about"].update(changes)


def tensor(end: str, change: Callable[[Tensor], Tensor]) -> Change:
    def apply(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if name.endswith(end))
        tensors[name] = change(tensors[name]).contiguous()

    return apply


def spoiled(value: float) -> Callable[[Tensor], Tensor]:
    """With one number that is no such number."""

    def change(whole: Tensor) -> Tensor:
        whole = whole.clone()
        whole.view(-1)[-1] = value
        return whole

    return change


BACKBONES: list[Change] = [
    *(backbone(weights=True), backbone(heads="3"), backbone(heads=0), backbone(heads=True), without("heads")),
    *(backbone(preprocessing={}), backbone(image_size=32000), backbone(image_size=-1), backbone(depth=2**30)),
    *(backbone(dim=1.0), backbone(depth=0), backbone(name="a\0b"), backbone(name=" ")),
    *(how(crop=0.0003), how(crop=0), how(crop="1"), how(mean=[0.5] * 4), how(std=[0.5, 0.5, 0]), how(more=1)),
    *(how(interpolation="best"), backbone(fingerprint=7), backbone(parameters=-1)),
]
HEADERS: list[Change] = [
    *BACKBONES,
    *(task(name="a\nb"), task(name=""), task(classes=[]), task(classes=["x" * 201, "y"]), task(classes=[[]])),
    *(task(domain=-1), task(domain="0"), task(few_shot=1), about(loss="low"), about(images=-3)),
    *(about(settings={"seed": {}}), about(accuracy=True), task(independent=None)),
    lambda header, tensors: header.update(settings=[]),
    lambda header, tensors: header["settings"].update(epochs=[1]),
    lambda header, tensors: header["settings"].update(temperature=0),
    lambda header, tensors: header.update(tasks={}),
    lambda header, tensors: header.update(tasks=[7]),
]
TENSORS: list[Change] = [
    *(tensor("0.prompt", lambda t: torch.tensor(1.0)), tensor("0.prompt", lambda t: t.repeat(9, 1, 1))),
    *(tensor("0.prompt", lambda t: t.repeat(1, 5000, 1)), tensor("0.prompt", spoiled(torch.nan))),
    *(tensor("values.means", spoiled(torch.inf)), tensor("values.means", spoiled(1e30))),
    *(tensor("values.deviations", spoiled(-1.0)), tensor("values.deviations", lambda t: t[:1])),
    *(tensor("values.counts", spoiled(0)), tensor("values.counts", spoiled(-5))),
    *(tensor("values.counts", spoiled(2**62)), tensor("values.counts", lambda t: t.int())),
]
POINTS: list[Change] = [
    *(tensor("plain.steps", spoiled(torch.nan)), tensor("plain.steps", spoiled(-0.01))),
    *(tensor("plain.steps", spoiled(60000.0)), tensor("plain.steps", lambda t: t.float())),
    *(tensor("plain.steps", lambda t: t[:1]), tensor("plain.steps", lambda t: t[:, None])),
    *(tensor("plain.points", lambda t: t.float()), tensor("plain.points", lambda t: torch.tensor(1).char())),
    *(tensor("plain.deviations", spoiled(torch.nan)), tensor("plain.deviations", spoiled(-1.0))),
    *(tensor("plain.counts", spoiled(-1)), tensor("plain.deviations", lambda t: t.double())),
    lambda header, tensors: tensors.pop("tasks.0.classes.0.plain.steps"),
    lambda header, tensors: tensors.pop("tasks.1.classes.0.plain.counts"),
]


def refused(data: bytes) -> None:
    with pytest.raises(ModelFileError, match="inconsistent header") as caught:
        model_file.unpack(data, PLACE)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("change", [*HEADERS, *TENSORS])
def test_an_odd_model_is_refused_on_reading(paper, change):
    refused(forged(paper, change))


@pytest.mark.parametrize("change", [*POINTS, *TENSORS[:4]])
def test_odd_points_are_refused_on_reading(evidence, change):
    refused(forged(evidence, change))


def test_numbers_of_many_digits_and_deep_headers_are_damage(paper):
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    for value in (HUGE, -HUGE, float("nan"), float("inf"), deep):
        with pytest.raises(ModelFileError) as caught:
            model_file.unpack(forged(paper, backbone(heads=value)), PLACE)
        assert "\n" not in str(caught.value)


def test_odd_metadata_of_a_safetensors_file_is_refused_in_one_line():
    for header in (
        '{"__metadata__":{"protosteer":{"a":1}}}',
        '{"__metadata__":7}',
        "[]",
        "[" * 5000,
        "1",
        "{}",
    ):
        data = len(header).to_bytes(8, "little") + header.encode()
        with pytest.raises(ModelFileError) as caught:
            unpack_tensors(data, "it")
        assert "\n" not in str(caught.value)
    for sealed in (
        "7",
        "[]",
        "{}",
        '{"header": {}, "sha256": 1}',
        "[" * 100_000,
        "9" * 5000,
        '{"header": 1e999}',
    ):
        text = json.dumps({"__metadata__": {"protosteer": sealed}})
        with pytest.raises(ModelFileError, match="altered or damaged"):
            unpack_tensors(len(text).to_bytes(8, "little") + text.encode(), "it")


def test_a_model_for_larger_images_than_its_weights_is_refused_at_once_and_cheaply():
    learner = Learner(Backbone.load("nano"), QUICK.replace(prompts=False))
    learner.learn(easy_task(["cat", "dog"]))
    data = learner.model.pack()
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for change, told in [
        (backbone(image_size=32000), "image_size is 32000"),
        (how(crop=0.0003), "need images of more than 4096 pixels"),
        (backbone(image_size=4096), "more than 64 x 64"),
        (backbone(image_size=256), "was learned with backbone 'nano'"),
        (backbone(fingerprint="0" * 64), "was learned with backbone 'nano'"),
        (backbone(heads=2), "was learned with backbone 'nano'"),
        (backbone(heads=7), "do not divide"),
    ]:
        with pytest.raises(ModelFileError, match=told):
            Learner.of_model(model_file.unpack(forged(data, change), PLACE))
    assert time.perf_counter() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes


def test_a_prompt_deeper_than_the_backbone_is_refused_though_the_header_says_it_is_as_deep(paper):
    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        header["backbone"]["depth"] = 9
        tensors["tasks.0.prompt"] = tensors["tasks.0.prompt"][:1].repeat(9, 1, 1)

    with pytest.raises(ModelFileError, match="9 layers of 1 tokens, the backbone 2 layers"):
        Learner.of_model(model_file.unpack(forged(paper, change), PLACE), tiny_backbone())


def test_early_files_do_not_tell_width_and_depth_and_are_read(paper):
    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del header["backbone"]["dim"], header["backbone"]["depth"]

    learner = Learner.of_model(model_file.unpack(forged(paper, change), PLACE), tiny_backbone())
    assert learner.classes == model_file.unpack(paper, PLACE).memory.classes


def test_positions_are_not_interpolated_before_the_fingerprint_is_known(monkeypatch):
    monkeypatch.setattr(
        "protosteer.backbones.build_vit.resample_positions", lambda *_: pytest.fail("too early")
    )
    with pytest.raises(WeightsError, match="has fingerprint"):
        Backbone.load("nano", image_size=64, fingerprint="0" * 64)


def test_a_similarity_that_is_no_number_is_never_an_answer(paper, monkeypatch):
    learner = Learner.of_model(model_file.unpack(paper, PLACE), tiny_backbone())
    images, _ = easy_task(["cat"])
    for settings in (learner.settings.replace(temperature=1e-300), learner.settings):
        learner.settings = settings
        with pytest.MonkeyPatch.context() as patch:
            if settings.temperature > 0.1:
                broken = tiny_backbone()
                broken.vit.norm.weight.data.fill_(torch.nan)
                patch.setattr(learner, "backbone", broken)
            for predict in (learner.predict, lambda some: next(learner.stream(some))):
                with pytest.raises(ModelFileError, match="not finite"):
                    predict(images)


def test_names_are_lines_of_text_wherever_they_enter(paper):
    learner = Learner(tiny_backbone(), QUICK)
    images, _ = easy_task(["cat"], per_class=4)
    model = model_file.unpack(paper, PLACE)
    for name in ("", " ", "a\nb", "\x1b[2J", "\u2028", "\ud800", "x" * 201):
        for attempt in (
            lambda name=name: learner.add_class(name, images),
            lambda name=name: learner.learn((images, [name] * 4)),
            lambda name=name: learner.learn((images, ["cat"] * 4), name=name or " "),
            lambda name=name: model_file.merge([model, model], {"cat": name}),
            lambda name=name: model_file.merge([model, model], task_renames={"first": name}),
        ):
            with pytest.raises(
                DataError, match=r"no name|not empty|control characters|201 characters"
            ) as caught:
                attempt()
            assert "\n" not in str(caught.value)
    assert learner.add_class("Fuß ☃ " + "x" * 194, images).class_names


@pytest.mark.parametrize("change", [*BACKBONES, tensor("prompt", spoiled(torch.nan))])
def test_an_odd_adapted_backbone_is_refused_too(tmp_path, change):
    prompt = torch.zeros(2, 1, 24)
    header = model_file.backbone_header(tiny_backbone())
    adapted = shared_prompt.Adapted(PLACE, header, Settings.preset("paper"), ["cat", "dog"], 16, prompt)
    path = tmp_path / "adapted"
    adapted.write(path)
    assert shared_prompt.read(path).classes == ["cat", "dog"]
    path.write_bytes(forged(path.read_bytes(), change))
    with pytest.raises(ModelFileError, match="inconsistent header"):
        shared_prompt.read(path)


def test_paths_that_are_no_files_are_refused_in_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for read in (model_file.read, shared_prompt.read):
        for path in (
            tmp_path / "pipe",
            tmp_path / "loop",
            tmp_path,
            tmp_path / "none",
            tmp_path / ("x" * 999),
        ):
            with pytest.raises(ProtosteerError):
                read(path)
