"""`protosteer run` and `protosteer compare`, as typed."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expect import expect_cli_error, run_cli
from protosteer.cli import main
from protosteer.errors import RunError
from protosteer.methods.ncm import NCM as NCMMethod
from protosteer.methods.ranpac import RanPAC

pytestmark = pytest.mark.slow

SMALL = ["--tasks", "3", "--train-per-class", "5", "--test-per-class", "4", "--device", "cpu"]
NCM = ["split-digits", "--method", "ncm", *SMALL]
FIGURES = {
    "last_accuracy", "avg_accuracy", "last_forgetting", "avg_forgetting", "prompts_per_image", "retrieval_accuracy",
    "bytes_per_task", "bytes_per_class", "train_seconds", "eval_seconds", "forward_passes", "naive_forward_passes",
    "passes_per_image",
}  # fmt: skip


def run(*words: object) -> int:
    return main(["run", *map(str, words)])


def test_json_has_the_contract_s_names(tmp_path, capsys):
    figures = json.loads(run_cli(capsys, "run", *NCM, "--seeds", "0,1", "--out", tmp_path / "r", "--json").out)
    assert set(figures) == {"mean", "std", "seeds"} and set(figures["mean"]) >= FIGURES
    assert [seed["seed"] for seed in figures["seeds"]] == [0, 1]
    assert all(len(row) == i + 1 for i, row in enumerate(figures["seeds"][0]["matrix"]))


def test_the_report_is_for_people_and_progress_goes_elsewhere(tmp_path, capsys):
    callbacks = run_cli(capsys, "run", *NCM, "--out", tmp_path / "r")
    assert "after task 3" in callbacks.out
    assert "task 1 of 3" in callbacks.err and f"Written: {tmp_path / 'r'}" in callbacks.err
    log = (tmp_path / "r" / "log.txt").read_text()
    assert "task 3 of 3" in log and log[:2] == "20"
    said = expect_cli_error(None, "run", *NCM, "--out", tmp_path / "r")
    assert all(flag in said for flag in ("--resume", "--overwrite", "--out"))


def test_command_line_beats_config_file(tmp_path, capsys):
    config = tmp_path / "x.toml"
    config.write_text(
        'stream = "split-digits"\nmethod = "ncm"\ntasks = 5\ntrain_per_class = 5\ntest_per_class = 2\ncentroids = 2\n'
    )
    words = ["--tasks", 2, "--set", "centroids=3", "--out", tmp_path / "r", "--json"]
    assert run("--config", config, *words) == 0
    known = json.loads((tmp_path / "r/manifest.json").read_text())["configuration"]
    assert known["settings"]["centroids"] == 3 and len(known["stream"]["tasks"]) == 2
    assert known["stream"]["options"]["test_per_class"] == 2
    words = ["--base", 4, "--increment", 3, "--out", tmp_path / "b", "--json"]
    assert run("--config", config, *words) == 0, "another way to share out the classes wins too"
    known = json.loads((tmp_path / "b/manifest.json").read_text())["configuration"]
    assert [len(task["classes"]) for task in known["stream"]["tasks"]] == [4, 3, 3]


def test_compare_prints_tables_and_draws(tmp_path, capsys):
    for centroids in (1, 2):
        assert run(*NCM, "--set", f"centroids={centroids}", "--out", tmp_path / f"c{centroids}") == 0
    folders = [str(tmp_path / "c1"), f"two={tmp_path / 'c2'}"]
    capsys.readouterr()
    assert main(["compare", *folders, "--plot", str(tmp_path / "p.png")]) == 0
    assert "two" in capsys.readouterr().out and (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert "| two |" in run_cli(capsys, "compare", *folders, "--markdown").out
    table = list(csv.DictReader(io.StringIO(run_cli(capsys, "compare", *folders, "--csv").out)))
    assert len(table) == 2 and float(table[0]["last_accuracy_mean"]) > 0
    rows = json.loads(run_cli(capsys, "compare", *folders, "--json").out)
    assert list(rows) == ["ncm", "two"] and set(rows["two"]) == {"mean", "std", "n", "seeds"}
    for option in ("--plot", "--reliability"):
        place = tmp_path / "p.png" / "q.png"
        code = "cannot-write" if option == "--plot" else None
        said = expect_cli_error(code, "compare", *folders, option, place)
        assert (option in said) == (option == "--plot")  # no run here tells its confidence


def test_reliability_is_drawn_of_the_runs_that_have_it(tmp_path, capsys):
    assert "Calibration" not in run_cli(capsys, "run", *NCM, "--out", tmp_path / "ncm").out
    told = run_cli(capsys, "run", "split-digits", *SMALL, "--preset", "instant", "--out", tmp_path / "instant").out
    assert "Calibration error (%)" in told and "score" in told and "Task retrieved" not in told
    folders = [str(tmp_path / "ncm"), str(tmp_path / "instant")]
    assert main(["compare", *folders, "--reliability", str(tmp_path / "r.png")]) == 0
    assert "Calibration" in capsys.readouterr().out and (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    assert "--reliability" in expect_cli_error(
        "cannot-write", "compare", *folders, "--reliability", tmp_path / "r.png" / "q.png"
    )


@pytest.mark.skipif(os.name == "nt", reason="signals as on POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path, number):
    words = ["run", "split-digits", "--set", "epochs=500", "--out", "my run"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    process = subprocess.Popen(
        [sys.executable, "-m", "protosteer", *words],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with SIGINT ignored, and children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (tmp_path / "my run" / "log.txt").is_file():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate()
    # A shell calls both 130: Python ends itself by the signal if it came amid an import that runs exec().
    assert process.returncode in (130, -signal.SIGINT), errors
    assert "protosteer run split-digits --set epochs=500 --out 'my run' --resume" in errors
    assert "Traceback" not in errors and not list(tmp_path.rglob("*.tmp"))


def test_a_preset_stands_for_settings_and_what_is_given_wins(tmp_path, capsys):
    words = ["split-digits", *SMALL, "--set", "epochs=1", "--set", "neck_hidden=8"]
    assert run(*words, "--preset", "fast", "--set", "centroids=2", "--out", tmp_path / "r", "--json") == 0
    figures = json.loads(capsys.readouterr().out)["mean"]
    assert figures["passes_per_image"] >= 1 and 0 < figures["calibration_error"] < 100
    told = json.loads((tmp_path / "r" / "manifest.json").read_text())["configuration"]
    assert told["method"] == "protosteer" and told["settings"]["rule"] == "evidence"
    assert told["settings"]["prompt_tasks"] == "first" and told["settings"]["centroids"] == 2


SEVERAL = ["split-digits", "--method", "ncm,ranpac", "--set", "features=20", "--set", "first_session=none", *SMALL]


def test_several_methods_end_in_the_table_that_compares_them(tmp_path, capsys):
    told = run_cli(capsys, "run", *SEVERAL, "--out", tmp_path)
    assert str(tmp_path) in told.err
    assert run_cli(capsys, "compare", tmp_path / "ncm", tmp_path / "ranpac").out == told.out
    assert "--resume" in expect_cli_error(None, "run", *SEVERAL, "--out", tmp_path)
    figures = json.loads(run_cli(capsys, "run", *SEVERAL, "--out", tmp_path, "--resume", "--json").out)
    assert list(figures) == ["ncm", "ranpac"] and set(figures["ncm"]) == {"mean", "std", "seeds"}
    picture = tmp_path / "pareto.png"
    assert main(["compare", str(tmp_path / "ncm"), str(tmp_path / "ranpac"), "--pareto", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_of_several_methods_one_that_fails_is_named_at_the_end(tmp_path, capsys, monkeypatch):
    def learn(*_):
        raise RunError("nothing is left; choose another out=")

    monkeypatch.setattr(NCMMethod, "learn", learn)
    assert run(*SEVERAL, "--out", tmp_path) == 1
    told = capsys.readouterr()
    assert told.err.endswith("error: method ncm: nothing is left; choose another --out\n")
    assert "ranpac" in told.out and "ncm" not in told.out


def test_ctrl_c_amid_several_methods_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def learn(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(RanPAC, "learn", learn)
    monkeypatch.setattr(sys, "argv", ["protosteer", "run", *SEVERAL, "--out", str(tmp_path)])
    assert main() == 130
    told = capsys.readouterr().err
    assert f"stopped; {tmp_path} keeps what was done" in told and "protosteer run split-digits" in told
    assert "--resume" in told and (tmp_path / "ncm" / "metrics.json").is_file()
