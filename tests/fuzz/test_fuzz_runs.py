"""Run folders and experiment files of others: compared as numbers, or rejected in one line."""

import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from rich.console import Console
from targets import TARGETS, Target, try_out
from targets import mutate as mutate_bytes
from test_fuzz_models import change_header

from protosteer.errors import ProtosteerError
from protosteer.evaluation.comparison import bins_of, gather
from protosteer.evaluation.experiment import Experiment, run_experiment
from protosteer.evaluation.metrics import over_seeds
from protosteer.report.compare import comparison_csv, comparison_markdown, comparison_tables
from protosteer.report.pareto import pareto_plot
from protosteer.report.plots import accuracy_bands
from protosteer.report.reliability import reliability_plot
from protosteer.settings import read_toml

pytestmark = pytest.mark.slow

FILES = ("manifest.json", "seed-0/metrics.json")
CHEAP = {"stream": "split-digits", "tasks": 2, "train_per_class": 3, "test_per_class": 2, "device": "cpu"}
EXPERIMENT = b"""stream = "split-digits"
method = "ncm"
seeds = [0, 1]
backbone = "nano"
order = "seed:1"
crop = 0.9
weights = "w.pth"
embed_batch_size = 8
"""


@functools.cache
def seeds() -> Sequence[bytes]:
    found = []
    with TemporaryDirectory() as folder:
        for method in ("ncm", "probe"):  # the second reports confidences
            out = Path(folder, method)
            run_experiment(Experiment.from_values({**CHEAP, "method": method, "out": str(out)}))
            found.append(json.dumps([json.loads((out / name).read_bytes()) for name in FILES]).encode())
    return found


def mutate(data: bytes, random: Random) -> bytes:
    if random.randrange(4) == 0:
        return mutate_bytes(data, random)
    content = json.loads(data)
    for _ in range(random.choice([1, 1, 2, 4])):
        change_header(random.choice(content) or {"": 0}, random)
    return json.dumps(content).encode()


def check(data: bytes) -> None:
    """Everything that `compare` prints, and now and then what it draws."""
    with TemporaryDirectory() as folder:
        run = Path(folder, "run")
        (run / "seed-0").mkdir(parents=True)
        try:
            parts = [json.dumps(part).encode() for part in json.loads(data)]
        except (ValueError, TypeError, RecursionError):
            parts = [data, data]
        for name, part in zip(FILES, parts, strict=False):
            (run / name).write_bytes(part)
        try:
            rows = gather([str(run)])
            Console(file=io.StringIO(), width=80).print(*comparison_tables(rows))
            for text in (comparison_markdown(rows), comparison_csv(rows)):
                text.encode()
            json.dumps([over_seeds(group) for group in rows.values()], allow_nan=False).encode()
            if sum(data) % 20 == 0:
                accuracy_bands({label: [seed["matrix"] for seed in group] for label, group in rows.items()})
                pareto_plot(rows)
                reliability_plot(bins_of(rows))
        except ProtosteerError as error:
            assert "\n" not in str(error) and len(str(error)) < 4000


def check_experiment(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "experiment.toml")
        path.write_bytes(data)
        try:
            experiment = Experiment.from_values(read_toml(path))
            assert experiment.folder
        except ProtosteerError as error:
            assert "\n" not in str(error) and len(str(error)) < 4000


TARGETS["runs"] = Target(seeds, check, mutate)
TARGETS["experiments"] = Target(lambda: [EXPERIMENT], check_experiment)


@pytest.mark.parametrize("name", ["runs", "experiments"])
def test_runs(name: str) -> None:
    try_out(name, examples=40)
