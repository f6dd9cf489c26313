"""A model file from an untrusted source may be checksummed and say anything: it is rejected in one line, at once."""

import copy
import functools
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import easy_task, tiny_backbone
from expect import expect_error
from photo_toys import EVIDENCE, QUICK
from protosteer.backbones import Backbone
from protosteer.errors import DataError, ModelFileError, ProtosteerError, WeightsError
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.model import schema
from protosteer.settings import Settings
from protosteer.util.tensor_file import pack_tensors, unpack_tensors
from protosteer.workflows import shared_prompt

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
PLACE = Path("a.protosteer")
GONE = object()


@functools.cache
def model(rule: str) -> bytes:
    learner = Learner(tiny_backbone(), {"paper": QUICK, "evidence": EVIDENCE}[rule])
    learner.learn(easy_task(["cat", "dog"]), name="first")
    learner.learn(easy_task(["eel", "fox"], per_class=45), name="second")
    return learner.model.pack()


def forged(data: bytes, change: Change) -> bytes:
    """The file after someone who knows the format has changed it and computed its checksum again."""
    header, tensors = unpack_tensors(data, "it")
    change(header, tensors)
    return pack_tensors(header, tensors)


def rejected(data: bytes) -> None:
    with expect_error("invalid-model", ModelFileError, path=PLACE) as caught:
        model_file.unpack(data, PLACE)
    assert len(str(caught.value)) < 300


def put(place: str, value: Any) -> Change:
    """Set a value of the header by its dotted place."""

    def change(header: Any, tensors: object) -> None:
        *outer, key = place.split(".")
        for step in outer:
            header = header[int(step) if isinstance(header, list) else step]
        if value is GONE:
            del header[key]
        else:
            header[int(key) if isinstance(header, list) else key] = value

    return change


BACKBONE: dict[str, list[Any]] = {
    "backbone": [[]],
    "backbone.name": ["a\0b", " "],
    "backbone.fingerprint": [7, None, "\udcff"],
    "backbone.heads": ["3", 0, True, GONE],
    "backbone.image_size": [32000, -1],
    "backbone.dim": [1.0],
    "backbone.depth": [2**30, 0],
    "backbone.weights": [True, "\ud800", "x" * 4097],
    "backbone.source": ["\ud800"],
    "backbone.pool": ["\udcff"],
    "backbone.parameters": [-1],
    "backbone.preprocessing": [{}, GONE],
    "backbone.preprocessing.crop": [0.0003, 0, "1"],
    "backbone.preprocessing.mean": [[0.5] * 4],
    "backbone.preprocessing.std": [[0.5, 0.5, 0]],
    "backbone.preprocessing.more": [1],
    "backbone.preprocessing.interpolation": ["best"],
}
HEADER: dict[str, list[Any]] = {
    **BACKBONE,
    "settings": [[], {"x" * 101: 1}, {"\udcff": 1}],
    "settings.epochs": [[1]],
    "settings.temperature": [0],
    "tasks": [{}, [7]],
    "tasks.0.name": ["a\nb", "", 7],
    "tasks.0.classes": [[], ["x" * 201, "y"], [[]], ["cat", "cat"], ["cat"], ["cat", "dog", "one more"]],
    "tasks.0.prompt": [None],
    "tasks.0.independent": [None],
    "tasks.0.domain": [-1, "0", 7],
    "tasks.0.few_shot": [1],
    "tasks.0.about": [[]],
    "tasks.0.about.loss": ["low"],
    "tasks.0.about.images": [-3, "many"],
    "tasks.0.about.image_bytes": ["many"],
    "tasks.0.about.learned": [5, "\udcff"],
    "tasks.0.about.file": ["\ud800", "\udfff"],
    "tasks.0.about.accuracy": [True],
    "tasks.0.about.settings": [[], {"seed": {}}, {"rule": "\udcff"}],
}


def cases(odd: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(place, value) for place, values in odd.items() for value in values]


@pytest.mark.parametrize("place, value", cases(HEADER))
def test_an_odd_header_is_rejected(place, value):
    rejected(forged(model("paper"), put(place, value)))


def test_names_of_files_need_not_be_utf8():
    """Linux allows any bytes; Python has them as surrogates of their own."""
    data = forged(model("paper"), put("tasks.0.about.file", name := os.fsdecode(b"pic\xff.png")))
    data = forged(data, put("backbone.weights", f"/there/{name}"))
    assert model_file.unpack(data, PLACE).memory.tasks[0].metadata.file == name


@pytest.mark.parametrize("place, value", cases(BACKBONE))
def test_an_odd_header_of_a_shared_prompt_is_rejected(tmp_path, place, value):
    header = model_file.backbone_header(tiny_backbone())
    path = tmp_path / "adapted"
    shared_prompt.Adapted(PLACE, header, Settings(), ["cat", "dog"], 16, torch.zeros(2, 1, 24)).write(path)
    assert shared_prompt.read(path).classes == ["cat", "dog"]
    good = path.read_bytes()
    for change in (put(place, value), lambda header, tensors: tensors["prompt"].fill_(torch.nan)):
        path.write_bytes(forged(good, change))
        with expect_error("invalid-model", ModelFileError, path=path):
            shared_prompt.read(path)


def numbers(spec: Any, place: str = "") -> Iterator[tuple[str, tuple[float, float]]]:
    """Every bounded number of the schema, and where it stands."""
    if isinstance(spec, dict):
        for key, part in spec.items():
            yield from numbers(part, f"{place}.{key.removesuffix('?')}".lstrip("."))
    elif isinstance(spec, list):
        yield from numbers(spec[0], f"{place}.0")
    elif isinstance(spec, tuple):
        yield place, spec


def test_every_number_of_a_header_is_within_its_bounds():
    header, _ = unpack_tensors(model("paper"), "it")
    for place, (least, most) in numbers(schema.MODEL):
        changed = copy.deepcopy(header)
        for value in (least, most):
            put(place, value)(changed, {})
            schema.check(changed, schema.MODEL, "it")
        for value in (int(least) - 1, int(most) + 1, True, "3"):
            put(place, value)(changed, {})
            with pytest.raises(TypeError):
                schema.check(changed, schema.MODEL, "it")


def spoiled(value: float) -> Callable[[Tensor], Tensor]:
    """With one number that does not belong there."""

    def change(whole: Tensor) -> Tensor:
        whole = whole.clone()
        whole.view(-1)[-1] = value
        return whole

    return change


def missing(tensor: Tensor) -> None:
    return None


PROMPTS = [lambda t: torch.tensor(1.0), lambda t: t.repeat(9, 1, 1), lambda t: t.repeat(1, 5000, 1), missing]
PROMPTS += [spoiled(torch.nan), lambda t: t[..., :3], lambda t: t.half()]
STARTS = [lambda t: t + 1, lambda t: t.flip(0), lambda t: t[:-1], lambda t: t.float(), missing]
STARTS += [lambda t: t[[0, 2, 1, 3, 4]], lambda t: t[[0, 0, 2, 3, 4]]]
COUNTS = [spoiled(0), spoiled(-5), spoiled(2**62), lambda t: t.int(), lambda t: t[1:], missing]
WIDTH = [lambda t: t[:, :-1], lambda t: t.double(), lambda t: t[:-1], lambda t: torch.tensor(1), missing]
PAPER: dict[str, list[Callable[[Tensor], Tensor | None]]] = {
    "tasks.0.prompt": PROMPTS,
    "starts.values": STARTS,
    "starts.keys": STARTS,
    "starts.other": [lambda t: torch.arange(3)],
    "starts.held_out": [lambda t: torch.tensor([0, 0, 0, 0, 1])],
    "starts.domain": [lambda t: torch.arange(5)],
    "classes.keys": WIDTH,
    "classes.values.means": [*WIDTH, spoiled(torch.inf), spoiled(1e30), spoiled(torch.nan)],
    "classes.values.deviations": [*WIDTH, spoiled(-1.0)],
    "classes.values.counts": COUNTS,
}
EVIDENT: dict[str, list[Callable[[Tensor], Tensor | None]]] = {
    "tasks.0.prompt": PROMPTS,
    "domains.0": PROMPTS,
    "starts.plain": STARTS,
    "starts.domain": STARTS,
    "starts.keys": [lambda t: torch.arange(5)],
    "classes.plain.points": [*WIDTH, lambda t: t.float()],
    "classes.domain.points": [*WIDTH, lambda t: t[:, :3]],
    "classes.plain.steps": [
        *(spoiled(value) for value in (torch.nan, torch.inf, -0.01, 60000.0, 0.1)),
        *(lambda t: t.float(), lambda t: t[:1], lambda t: t[:, None], missing),
    ],
    "starts.domain_layers": STARTS,
    "classes.domain_layers.codes": [
        *(lambda t: t[..., :-1], lambda t: t.float(), lambda t: t[:-1], lambda t: t[:, 0], lambda t: t[:, :0], missing),
        lambda t: t.repeat(1, 40, 1),
    ],
    "classes.domain_layers.steps": [
        *(spoiled(value) for value in (torch.nan, torch.inf, -0.01, 9.0)),
        *(lambda t: t.float(), lambda t: t[:-1], lambda t: t[:, :-1], missing),
    ],
    "classes.plain.counts": [*COUNTS, lambda t: t * 5],
    "classes.plain.deviations": [*WIDTH, spoiled(torch.nan), spoiled(-1.0), spoiled(2.0)],
}


@pytest.mark.parametrize(
    "rule, name, change",
    [
        (rule, name, change)
        for rule, odd in (("paper", PAPER), ("evidence", EVIDENT))
        for name in odd
        for change in odd[name]
    ],
)
def test_odd_tensors_are_rejected(rule, name, change):
    def apply(header: object, tensors: dict[str, Tensor]) -> None:
        changed = change(tensors.pop(name, torch.empty(0)))
        if changed is not None:
            tensors[name] = changed.contiguous()

    rejected(forged(model(rule), apply))


def test_held_out_similarities_and_digests_are_lists_of_numbers():
    for group, odd in {
        "held_out": [torch.full((4,), torch.nan), torch.ones(4, 1), torch.ones(4).half()],
        "seen": [torch.ones(4), torch.ones(4, 1, dtype=torch.int64)],
    }.items():
        for column in odd:
            columns = {f"classes.{group}": column, f"starts.{group}": torch.arange(5)}
            rejected(forged(model("paper"), lambda header, tensors, new=columns: tensors.update(new)))
        column = torch.zeros(4, dtype=torch.float32 if group == "held_out" else torch.int64)
        for starts in ([0, 3, 1, 2, 4], [0, 1, 2, 3, 5], [1, 1, 2, 3, 4], [0, 4]):
            columns = {f"classes.{group}": column, f"starts.{group}": torch.tensor(starts)}
            rejected(forged(model("paper"), lambda header, tensors, new=columns: tensors.update(new)))


def test_numbers_of_many_digits_and_deep_headers_are_damage():
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    for value in (int("9" * 400), -int("9" * 400), float("nan"), float("inf")):
        with expect_error("damaged-model", ModelFileError):
            model_file.unpack(forged(model("paper"), put("backbone.heads", value)), PLACE)
    rejected(forged(model("paper"), put("backbone.heads", deep)))


def test_odd_metadata_of_a_safetensors_file_is_rejected():
    for header in ('{"__metadata__":{"protosteer":{"a":1}}}', '{"__metadata__":7}', "[]", "[" * 5000, "1", "{}"):
        with pytest.raises(ModelFileError) as caught:
            unpack_tensors(len(header).to_bytes(8, "little") + header.encode(), "it")
        assert "\n" not in str(caught.value)
    odd = ("7", "[]", "{}", '{"header": {}, "sha256": 1}', "[" * 100_000, "9" * 5000, '{"header": 1e999}')
    for content in odd:
        text = json.dumps({"__metadata__": {"protosteer": content}})
        with expect_error("damaged-model", ModelFileError):
            unpack_tensors(len(text).to_bytes(8, "little") + text.encode(), "it")
    with expect_error("damaged-model", ModelFileError):
        unpack_tensors(pack_tensors(None, {}), "it")  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_files_are_rejected(keep):
    with expect_error("damaged-model", ModelFileError):
        model_file.unpack(model("paper")[:keep], PLACE)


def test_every_altered_byte_is_noticed():
    good = model("paper")
    for place in range(0, len(good), max(1, len(good) // 60)):
        bad = bytearray(good)
        bad[place] ^= 0x04
        with pytest.raises(ModelFileError):
            model_file.unpack(bytes(bad), PLACE)


def test_paths_that_are_no_model_files_are_rejected(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    with expect_error("not-a-model", ModelFileError):
        model_file.read(tmp_path / "x.safetensors")
    with expect_error("missing-model", ModelFileError, path=tmp_path / "none"):
        model_file.read(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for read in (model_file.read, shared_prompt.read):
        for name in ("pipe", "loop", ".", "none", "x" * 999):
            with pytest.raises(ProtosteerError):
                read(tmp_path / name)


def test_a_model_for_larger_images_than_its_weights_is_rejected_at_once_and_cheaply():
    learner = Learner(Backbone.load("nano"), QUICK.replace(prompts=False))
    learner.learn(easy_task(["cat", "dog"]))
    data = learner.model.pack()
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for place, value, code in [
        ("backbone.image_size", 32000, "invalid-model"),
        ("backbone.preprocessing.crop", 0.0003, "invalid-model"),
        ("backbone.image_size", 4096, "backbone-not-found"),
        ("backbone.image_size", 256, "other-backbone"),
        ("backbone.fingerprint", "0" * 64, "other-backbone"),
        ("backbone.heads", 2, "other-backbone"),
        ("backbone.heads", 7, "backbone-not-found"),
    ]:
        with expect_error(code, ModelFileError):
            Learner.of_model(model_file.unpack(forged(data, put(place, value)), PLACE))
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes


def test_a_prompt_deeper_than_the_backbone_is_rejected_though_the_header_says_it_is_as_deep():
    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        header["backbone"]["depth"] = 9
        tensors["tasks.0.prompt"] = tensors["tasks.0.prompt"][:1].repeat(9, 1, 1)

    read = model_file.unpack(forged(model("paper"), change), PLACE)
    with expect_error("other-backbone", ModelFileError):
        Learner.of_model(read, tiny_backbone())


def test_early_files_do_not_tell_width_and_depth_and_are_read():
    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del header["backbone"]["dim"], header["backbone"]["depth"]

    learner = Learner.of_model(model_file.unpack(forged(model("paper"), change), PLACE), tiny_backbone())
    assert learner.classes == ["cat", "dog", "eel", "fox"]


def test_positions_are_not_interpolated_before_the_fingerprint_is_known(monkeypatch):
    monkeypatch.setattr("protosteer.backbones.build_vit.resample_positions", lambda *_: pytest.fail("too early"))
    with expect_error("other-weights", WeightsError):
        Backbone.load("nano", image_size=64, fingerprint="0" * 64)


def test_a_similarity_that_is_no_number_is_never_an_answer():
    learner = Learner.of_model(model_file.unpack(model("paper"), PLACE), tiny_backbone())
    images, _ = easy_task(["cat"])
    for changed in (learner.settings.replace(temperature=1e-300), learner.settings):
        learner.settings = changed
        with pytest.MonkeyPatch.context() as patch:
            if changed.temperature > 0.1:
                broken = tiny_backbone()
                broken.vit.norm.weight.data.fill_(torch.nan)
                patch.setattr(learner, "backbone", broken)
            for predict in (learner.predict, lambda some: next(learner.stream(some))):
                with pytest.raises(ModelFileError):
                    predict(images)


def test_names_are_lines_of_text_wherever_they_enter():
    learner = Learner(tiny_backbone(), QUICK)
    images, _ = easy_task(["cat"], per_class=4)
    read = model_file.unpack(model("paper"), PLACE)
    for name in ("", " ", "a\nb", "\x1b[2J", "\u2028", "\ud800", "x" * 201):
        for attempt in (
            lambda name=name: learner.add_class(name, images),
            lambda name=name: learner.learn((images, [name] * 4)),
            lambda name=name: learner.learn((images, ["cat"] * 4), name=name or " "),
            lambda name=name: model_file.merge([read, read], {"cat": name}),
            lambda name=name: model_file.merge([read, read], task_renames={"first": name}),
        ):
            with pytest.raises(DataError) as caught:
                attempt()
            assert caught.value.code in ("bad-name", "bad-label") and "\n" not in str(caught.value)
    assert learner.add_class("Fuß ☃ " + "x" * 194, images).class_names
