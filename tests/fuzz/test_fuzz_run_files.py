"""Whole run folders of others, finished and not: reported, evaluated again or resumed, or rejected in one line."""

import functools
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from targets import TARGETS, Target, try_out
from targets import mutate as mutate_bytes
from test_fuzz_models import change_header, change_tensors
from test_fuzz_models import mutate as mutate_model
from test_fuzz_runs import CHEAP

from protosteer.errors import ProtosteerError
from protosteer.evaluation.comparison import gather
from protosteer.evaluation.experiment import Experiment, run_experiment
from protosteer.evaluation.experiment_context import ExperimentContext, open_context
from protosteer.evaluation.reevaluation import plan_reevaluation
from protosteer.evaluation.seed_runs import Reporter
from protosteer.evaluation.sweep import run_several
from protosteer.report.run_page import as_html, read_report

pytestmark = pytest.mark.slow


class Stop(Exception):
    pass


class StopAfterTask(Reporter):
    def on_task(self, i: int, run: Any) -> None:
        raise Stop


@functools.cache
def context() -> ExperimentContext:
    return open_context(experiment("ncm", "none"))


def experiment(method: str, out: Path | str) -> Experiment:
    return Experiment.from_values({**CHEAP, "method": method, "out": str(out)})


@functools.cache
def seeds(finished: bool) -> Sequence[bytes]:
    """Run folders of two methods, the second with confidences, as zip files; unfinished ones lack the second task."""
    found = []
    for method in ("ncm", "probe"):
        with TemporaryDirectory() as folder:
            make = None if finished else lambda *_: StopAfterTask()
            try:
                run_experiment(experiment(method, folder), make_reporter=make, context=context())
            except Stop:
                assert not finished
            paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            found.append(packed({str(path.relative_to(folder)): path.read_bytes() for path in paths}))
    return found


def packed(files: dict[str, bytes]) -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return whole.getvalue()


def unpacked(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def mutate(data: bytes, random: Random) -> bytes:
    files = unpacked(data)
    name = random.choice([name for name in files if name.endswith((".json", ".npz", ".safetensors"))])
    if random.randrange(4) == 0:
        files[name] = mutate_bytes(files[name], random)
    elif name.endswith(".json"):
        content = {"": json.loads(files[name])}
        change_header(content, random)
        files[name] = json.dumps(content.get("")).encode()
    elif name.endswith(".npz"):
        files[name] = change_arrays(files[name], random)
    elif "embeddings" in name:
        tensors = load(files[name])
        change_tensors(tensors, random)
        files[name] = save({key: tensor.clone().contiguous() for key, tensor in tensors.items()})
    else:
        files[name] = mutate_model(files[name], random)
    return packed(files)


def change_arrays(data: bytes, random: Random) -> bytes:
    """Change numbers or names of stored predictions."""
    with np.load(io.BytesIO(data)) as arrays:
        content = {name: arrays[name] for name in arrays}
    names = content["classes"].tolist()
    tensors = {name: torch.from_numpy(array) for name, array in content.items() if name != "classes"}
    if random.randrange(4) == 0:
        change_header({"": names}, random)
    else:
        change_tensors(tensors, random)
    numbers = {k: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for k, t in tensors.items()}
    whole = io.BytesIO()
    np.savez_compressed(whole, classes=np.array(list(map(str, names))), **numbers)
    return whole.getvalue()


def put(data: bytes, folder: str) -> Path:
    run = Path(folder, "run")
    for name, content in unpacked(data).items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)
    return run


def check_finished(data: bytes) -> None:
    """What `report` writes, and what `evaluate-run` measures anew."""
    with TemporaryDirectory() as folder:
        run = put(data, folder)
        for work in (report, evaluate):
            try:
                work(run)
            except ProtosteerError as error:
                assert "\n" not in str(error) and len(str(error)) < 4000


def report(run: Path) -> None:
    as_html(read_report(gather([str(run)])), "runs").encode()


def evaluate(run: Path) -> None:
    plan = plan_reevaluation(run, {"device": "cpu", "out": str(run.with_name("again"))})
    run_several(plan)


def check_unfinished(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        run = put(data, folder)
        try:
            method = json.loads((run / "manifest.json").read_bytes())["configuration"]["method"]
        except (ValueError, LookupError, TypeError):
            method = "ncm"
        try:
            run_experiment(experiment(method if method == "probe" else "ncm", run), resume=True, context=context())
        except ProtosteerError as error:
            assert "\n" not in str(error) and len(str(error)) < 4000


TARGETS["finished-runs"] = Target(lambda: seeds(True), check_finished, mutate)
TARGETS["unfinished-runs"] = Target(lambda: seeds(False), check_unfinished, mutate)


@pytest.mark.parametrize("name", ["finished-runs", "unfinished-runs"])
def test_run_files(name: str) -> None:
    try_out(name, examples=30)
