"""`torchrun -m protosteer run|learn|adapt`: the results of one process, written and reported once."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from expect import run_cli
from photo_toys import photos
from protosteer.cli import main
from protosteer.model.history import beside
from rank_toys import SECONDS, TESTS, environment, run_ranks

pytestmark = pytest.mark.slow

# Six steps for each of two tasks.
RUN = ["run", "split-digits", "--device", "cpu", "--tasks", "2", "--train-per-class", "6"]
RUN += ["--test-per-class", "2", "--set", "neck_hidden=64", "--set", "epochs=2", "--set", "batch_size=10"]
NANO = ["--backbone", "nano", "--device", "cpu", "--set", "epochs=2", "--set", "neck_hidden=64", "--json"]


def two_ranks(accident: str, *words: object) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of rank 0 and of rank 1."""
    return run_ranks(2, TESTS / "cli" / "torchrun_accidents.py", accident, *words)


def same_models(one: Path, two: Path) -> None:
    mine, theirs = load_file(one), load_file(two)
    assert mine.keys() == theirs.keys()
    for name in mine:  # some are kept in half precision
        if name.endswith(".codes"):  # two 4-bit numbers each, which rounding may move to the next level
            pairs = [(codes // 16, codes % 16) for codes in (mine[name].int(), theirs[name].int())]
            moved = torch.stack([(a - b).abs() for a, b in zip(*pairs, strict=True)])
            assert moved.max() <= 1 and moved.double().mean() < 0.01
        else:
            torch.testing.assert_close(mine[name].float(), theirs[name].float(), atol=2e-3, rtol=2e-3, msg=name)


def same_runs(one: Path, two: Path) -> None:
    files = [sorted(p.relative_to(folder) for p in folder.rglob("*")) for folder in (one, two)]
    assert files[0] == files[1]
    assert (one / "seed-0/matrix.csv").read_text() == (two / "seed-0/matrix.csv").read_text()
    models = list(one.glob("seed-0/*.protosteer"))
    assert models
    for model in models:
        same_models(model, two / "seed-0" / model.name)


def log_lines(folder: Path) -> list[str]:
    """Without times, the command line, and progress within a task, which is logged after some seconds."""
    lines = [re.sub(r"^\S+ \S+ ", "", line) for line in (folder / "log.txt").read_text().splitlines()]
    return [line for line in lines[1:] if not re.match(r"  task \d+ of \d+, ", line)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    assert main([*RUN, "--out", str(out)]) == 0
    return out


def test_a_run_by_torchrun_is_that_of_one_process(one: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    made = subprocess.run(
        [*torchrun, "-m", "protosteer", *RUN, "--out", str(tmp_path / "two")],
        env=environment(TMPDIR=tmp_path / "private"),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert made.returncode == 0, made.stderr
    same_runs(one, tmp_path / "two")
    assert made.stdout.count("Calibration error") == made.stderr.count("Written:") == 1
    assert log_lines(tmp_path / "two") == log_lines(one)
    assert not list((tmp_path / "private").glob("protosteer-*"))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_run_resumes_with_any_number_of_processes(
    victim: int, one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = two_ranks(f"killed-{victim}", *RUN, "--out", tmp_path / "two")
    assert ended[victim][0] == -9 and ended[1 - victim][0] == 2
    assert ended[victim][2].count("error:") == 0 and ended[1 - victim][2].count("error:") == 1
    assert len(list((tmp_path / "two").rglob("training-001.safetensors"))) == 1
    again = [*RUN, "--out", str(tmp_path / "two"), "--resume"]
    if victim:  # with two processes again, or with one
        for code, _, messages in two_ranks("none", *again):
            assert code == 0, messages
    else:
        assert "processes: 2 -> 1" in run_cli(capsys, *again).err
    same_runs(one, tmp_path / "two")


def test_two_ranks_learn_folders_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [photos(tmp_path / "a", ["ant", "bee"], 8), photos(tmp_path / "b", ["cat", "dog"], 8)]
    rank0, rank1 = two_ranks("none", "learn", tmp_path / "two.protosteer", *folders, *NANO)
    assert rank0[0] == 0 and rank1 == (0, "", ""), rank0[2]
    assert main(["learn", str(tmp_path / "one.protosteer"), *map(str, folders), *NANO]) == 0
    assert json.loads(rank0[1]) == json.loads(capsys.readouterr().out)
    same_models(tmp_path / "one.protosteer", tmp_path / "two.protosteer")
    models = [tmp_path / "one.protosteer", tmp_path / "two.protosteer"]
    assert {*tmp_path.iterdir()} == {tmp_path / "a", tmp_path / "b", *models, *map(beside, models)}


def test_two_ranks_adapt_a_backbone(tmp_path: Path) -> None:
    words = ["adapt", photos(tmp_path / "a", ["ant", "bee"], 8), *NANO, "--out"]
    rank0, rank1 = two_ranks("none", *words, tmp_path / "two.adapted")
    assert rank0[0] == 0 and rank1 == (0, "", ""), rank0[2]
    assert main([*map(str, words), str(tmp_path / "one.adapted")]) == 0
    same_models(tmp_path / "one.adapted", tmp_path / "two.adapted")


def test_a_rank_that_fails_alone_ends_all_with_its_message(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", ["ant", "bee"], 8)
    rank0, rank1 = two_ranks("unreadable", "learn", tmp_path / "two.protosteer", folder, *NANO)
    assert (rank0[0], rank1[0]) == (2, 2) and "error:" not in rank0[2]
    assert re.fullmatch(r"process 1 of 2 on \S+: error: .*cannot be read; see that it is there\n", rank1[2])
    assert not (tmp_path / "two.protosteer").exists()


def test_a_mistake_is_reported_once() -> None:
    rank0, rank1 = two_ranks("none", "run", "split-digit")
    assert rank0[0] == 2 and rank0[2].startswith("error:") and rank0[2].count("\n") == 1
    assert rank1 == (2, "", "")


def test_other_commands_run_on_rank_0_alone() -> None:
    rank0, rank1 = two_ranks("none", "backbones", "--json")
    assert rank0[0] == 0 and json.loads(rank0[1]) and rank1 == (0, "", "")
