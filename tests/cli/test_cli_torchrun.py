"""`torchrun -m protosteer run|learn`: as one process, written and told once, whatever happens."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from photo_toys import photos
from protosteer.cli import main
from world_toys import TESTS, free_port, start

pytestmark = pytest.mark.slow

SMALL = [
    "--tasks",
    "2",
    "--train-per-class",
    "6",
    "--test-per-class",
    "2",
    "--device",
    "cpu",
    "--set",
    "neck_hidden=64",
]
RUN = [
    "run",
    "split-digits",
    *SMALL,
    "--set",
    "epochs=2",
    "--set",
    "batch_size=10",
]  # six steps for each task
SECONDS = 240.0  # until a test gives up; a group that hangs would take ten minutes


def by_two(accident: str, *words: object) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of the leader and of its helper."""
    port, script = free_port(), str(TESTS / "cli" / "torchrun_accidents.py")
    group = [start([script, accident, *map(str, words)], rank, 2, port) for rank in range(2)]
    try:
        callbacks = [process.communicate(timeout=SECONDS) for process in group]
    finally:
        for process in group:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(group, callbacks, strict=True)]


def same_models(one: Path, two: Path) -> None:
    assert one.suffix == ".protosteer"
    mine, theirs = load_file(one), load_file(two)
    assert mine.keys() == theirs.keys()
    for name in mine:  # some are kept in half precision
        torch.testing.assert_close(mine[name].float(), theirs[name].float(), atol=2e-3, rtol=2e-3, msg=name)


def same_runs(one: Path, two: Path) -> None:
    assert (one / "seed-0/matrix.csv").read_text() == (two / "seed-0/matrix.csv").read_text()
    assert sorted(p.relative_to(one) for p in one.rglob("*")) == sorted(
        p.relative_to(two) for p in two.rglob("*")
    )
    for model in one.glob("seed-0/*.protosteer"):
        same_models(model, two / "seed-0" / model.name)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    assert main([*RUN, "--out", str(out)]) == 0
    return out


def test_a_run_by_torchrun_is_that_of_one_process(one: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(TESTS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    made = subprocess.run(
        [*torchrun, "-m", "protosteer", *RUN, "--out", str(tmp_path / "two")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert made.returncode == 0, made.stderr
    same_runs(one, tmp_path / "two")
    assert made.stdout.count("Calibration error") == made.stderr.count("Written:") == 1
    told = [
        re.sub(r"^\S+ \S+ |--out \S+", "", line)
        for line in (tmp_path / "two/log.txt").read_text().splitlines()
    ]
    expected = [
        re.sub(r"^\S+ \S+ |--out \S+", "", line) for line in (one / "log.txt").read_text().splitlines()
    ]
    assert told[1:] == expected[1:]


def test_killed_with_two_a_run_goes_on_with_one_and_with_two(one: Path, tmp_path: Path, capsys) -> None:
    (code, *_), helper = by_two("killed", *RUN, "--out", tmp_path / "two")
    assert code == -9 and helper == (2, "", "")  # who was killed cannot tell, and a helper need not
    kept = list((tmp_path / "two").rglob("training-001.safetensors"))
    assert len(kept) == 1
    shutil.copytree(tmp_path / "two", tmp_path / "alone")
    assert main([*RUN, "--out", str(tmp_path / "alone"), "--resume"]) == 0
    assert "goes on under other circumstances (processes: 2 -> 1" in capsys.readouterr().err
    same_runs(one, tmp_path / "alone")
    for code, _, said in by_two("none", *RUN, "--out", tmp_path / "two", "--resume"):
        assert code == 0, said
    same_runs(one, tmp_path / "two")


def test_photos_are_learned_by_two(tmp_path: Path, capsys) -> None:
    folder = photos(tmp_path / "photos", ["ant", "bee"], 8)
    words = [folder, "--backbone", "nano", "--set", "epochs=2", "--set", "neck_hidden=64"]
    words += ["--device", "cpu", "--json"]
    leader, helper = by_two("none", "learn", tmp_path / "two.protosteer", *words)
    assert leader[0] == 0 and helper == (0, "", ""), leader[2]
    assert main(["learn", str(tmp_path / "one.protosteer"), *map(str, words)]) == 0
    assert leader[1] == capsys.readouterr().out
    same_models(tmp_path / "one.protosteer", tmp_path / "two.protosteer")


def test_a_helper_that_fails_ends_all_with_its_line(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", ["ant", "bee"], 8)
    words = [folder, "--backbone", "nano", "--device", "cpu", "--json"]
    leader, helper = by_two("unreadable", "learn", tmp_path / "two.protosteer", *words)
    assert (leader[0], helper[0]) == (2, 2)
    assert re.fullmatch(
        r"error in process 1 of 2 on \S+: .*cannot be read; see that it is there\n", helper[2]
    )
    assert leader[2].splitlines()[-1].startswith("error: a process of the group has ended")
    assert leader[2].count("error") == 1 and not (tmp_path / "two.protosteer").exists()


def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    leader, helper = by_two("none", "run", "split-digit")
    assert leader[0] == 2 and leader[2].startswith("error:") and leader[2].count("\n") == 1
    assert helper == (2, "", "")
