"""Model files that someone has changed and sealed again: refused in one line, or they predict finite numbers."""

import copy
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from targets import TARGETS, Target, try_out
from targets import mutate as mutate_bytes
from torch import Tensor

from conftest import easy_task, tiny_backbone
from golden_toys import FOLDER, golden_backbone, queries
from photo_toys import EVIDENCE, QUICK
from protosteer.errors import ProtosteerError
from protosteer.learner import Learner
from protosteer.model import file as model_file
from protosteer.util.tensor_file import pack_tensors, unpack_tensors
from protosteer.workflows import model_summary

pytestmark = pytest.mark.slow

VALUES: list[Any] = [None, True, False, 0, -1, 1, 2, 3, 10**9, 2**62, 10**400, 0.5, -0.5, 1e-300, 1e300]
VALUES += [
    math.nan,
    math.inf,
    "",
    " ",
    "x",
    "cat",
    "a\nb",
    "\x1b[2J",
    "x" * 5000,
    "\ud800",
    "\udcff",
    [],
    {},
    [[]],
    {"a": {}},
]
NUMBERS = [0.0, -0.0, 1.0, -1.0, 127.0, 65504.0, 1e-40, 1e30, -1e30, math.nan, math.inf, -math.inf]
KINDS = [torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool, torch.bfloat16]


OLD = ("paper-few-shot", "evidence-corrected", "evidence-unfinished-float16", "many-evidence")  # formats 1, 2, 2, 3


golden = functools.cache(golden_backbone)


@functools.cache
def seeds() -> Sequence[bytes]:
    found = []
    for settings in (QUICK, EVIDENCE):
        learner = Learner(tiny_backbone(), settings)
        learner.learn(easy_task(["cat", "dog"], per_class=4), name="first")
        learner.learn(easy_task(["eel"], per_class=4), name="second")
        learner.add_class("fox", easy_task(["fox"], per_class=2)[0])
        found.append(learner.model.pack())
    return [*found, *((FOLDER / f"{name}.protosteer").read_bytes() for name in OLD)]


def mutate(data: bytes, random: Random) -> bytes:
    """One to four changes of header or tensors, sealed again; at times of the bytes instead."""
    if random.randrange(10) == 0:
        return mutate_bytes(data, random)
    header, tensors = unpack_tensors(data, "it")
    for _ in range(random.choice([1, 1, 2, 4])):
        if random.randrange(2):
            change_header(header, random)
        else:
            change_tensors(tensors, random)
    return pack_tensors(header, tensors)


def change_header(header: dict[str, Any], random: Random) -> None:
    place: Any = header
    while place:
        key = random.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], (dict, list)) or not place[key] or random.randrange(5) == 0:
            break
        place = place[key]
    else:  # a header that has lost everything
        return
    kind = random.randrange(6)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, list):
        place.append(place[key])
    elif kind == 2 and type(place[key]) in (int, float):
        place[key] = place[key] * random.choice([-1, 2, 10, 1000, 10**12]) + random.choice([-1, 0, 1])
    else:
        place[key] = copy.deepcopy(random.choice(VALUES))  # else a list could end up inside itself


def change_tensors(tensors: dict[str, Tensor], random: Random) -> None:
    if not tensors:
        return
    name = random.choice(list(tensors))
    tensor, kind = tensors[name], random.randrange(7)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name] = tensors[random.choice(list(tensors))]
    elif kind == 2:
        tensors[name] = tensor.nan_to_num().to(random.choice(KINDS))
    elif kind == 3 and tensor.ndim:
        axis = random.randrange(tensor.ndim)
        tensors[name] = tensor.narrow(axis, 0, random.randrange(tensor.shape[axis] + 1))
    elif kind == 4 and tensor.ndim:
        tensors[name] = torch.cat([tensor] * random.choice([2, 40]), dim=random.randrange(tensor.ndim))
    elif kind == 5:
        tensors[name] = random.choice(
            [tensor[None], tensor.flatten(), tensor.sum(), tensor.mT if tensor.ndim > 1 else tensor]
        )
    elif tensor.numel():
        changed = tensor.double().contiguous().clone()
        changed.view(-1)[random.randrange(tensor.numel()) :: random.choice([1, 3, 10**6])] = random.choice(NUMBERS)
        tensors[name] = changed.to(tensor.dtype)


def check(data: bytes) -> None:
    """Read, described, used for prediction, written and read again."""
    try:
        model = model_file.unpack(data, Path("it"))
        again = model_file.unpack(model.pack(), Path("it"))
        old = golden()
        known = model.backbone["fingerprint"] == old.fingerprint
        learner = Learner.of_model(model, old if known else tiny_backbone())
        description = model_summary.describe(model, learner.reader)
        description["backbone"]["weights"] = None  # a path, which need not be UTF-8
        json.dumps([description, *map(model_summary.correction, model.memory.corrections)], ensure_ascii=False).encode()
        answer = learner.predict(queries() if known else easy_task(["cat", "gnu"], per_class=2)[0])
    except ProtosteerError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return
    assert answer.scores.isfinite().all() and answer.similarities.isfinite().all()
    assert answer.probabilities.isfinite().all() and set(answer.labels) <= set(model.memory.classes)
    assert again.pack() == model.pack()


TARGETS["models"] = Target(seeds, check, mutate)


def test_models() -> None:
    try_out("models", examples=300)
