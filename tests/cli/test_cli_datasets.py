"""`protosteer datasets`: what is there, getting the rest, one line for mistakes."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

from expect import expect_cli_error, run_cli
from protosteer.cli import main
from protosteer.data.datasets import prepare
from protosteer.data.datasets.registry import DATASETS
from protosteer.errors import DataError


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data folder with CIFAR-100 files that have the official names, and a record that trusts them."""
    folder = tmp_path / "data" / "cifar-100-python"
    folder.mkdir(parents=True)
    table = {"data": np.zeros((1, 3072), np.uint8), "fine_labels": [0]}
    for name in ("train", "test", "meta"):
        (folder / name).write_bytes(pickle.dumps(table))
    monkeypatch.setitem(DATASETS, "cifar100", replace(DATASETS["cifar100"], md5={}))
    return tmp_path / "data"


def test_the_list_names_all_and_says_where(root, capsys):
    out, errors = run_cli(capsys, "datasets", "--data-dir", root)
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert set(DATASETS) <= set(rows)
    assert "169 MB" in rows["cifar100"] and rows["cifar100"].rstrip().endswith("cifar-100-python")
    assert "by hand" in rows["imagenet-subset"] and rows["cub200"].rstrip().endswith("no")
    assert rows["digits"].rstrip().endswith("with sklearn") and "CC BY 4.0" in rows["digits"]
    assert str(root) in errors and "datasets get NAME" in errors


def test_the_list_is_readable_in_100_columns(root, capsys, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr("protosteer.cli.catalogue.make_console", lambda stderr=False: Console(width=100))
    lines = run_cli(capsys, "datasets", "--data-dir", root).out.splitlines()
    assert max(map(len, lines)) <= 100 and not any("…" in line for line in lines)
    for info in DATASETS.values():
        row = next(line for line in lines if line.split()[:1] == [info.name])
        assert info.licence in row and info.source.split("/")[2].removeprefix("www.") in row
    assert sum(bool(line.strip()) for line in lines) == 2 + len(DATASETS), "one line for each"


def test_the_list_as_json(root, capsys, monkeypatch):
    monkeypatch.setenv("PROTOSTEER_DATA", str(root))
    told = json.loads(run_cli(capsys, "datasets", "--json").out)
    rows = {row["name"]: row for row in told["datasets"]}
    assert told["folder"] == str(root) and list(rows) == list(DATASETS)
    assert rows["cifar100"]["present"] and rows["cifar100"]["path"] == str(root / "cifar-100-python")
    svhn = rows["svhn"]
    assert svhn["bytes"] == 246_316_178 and not svhn["present"] and svhn["path"] is None
    assert svhn["files"][0]["md5"] == "e26dedcc434d2e4c54c9b2d4a06d8373"
    assert rows["notmnist"]["bytes"] is None and rows["notmnist"]["note"]


@pytest.mark.parametrize(
    "words", [["get", "cifar100", "digits", "--data-dir", "ROOT"], ["--data-dir", "ROOT", "get", "cifar100"]]
)
def test_get_verifies_what_is_there(root, capsys, words):
    assert main(["datasets", *(str(root) if word == "ROOT" else word for word in words)]) == 0
    assert f"cifar100: in {root / 'cifar-100-python'}" in capsys.readouterr().out


def test_get_counts_the_files_that_are_as_published(shared, capsys):
    if not (shared / "data" / "mnist").is_dir():
        pytest.skip(f"no MNIST: {shared / 'data' / 'mnist'} does not exist")
    assert main(["datasets", "get", "mnist", "--data-dir", str(shared / "data")]) == 0
    assert capsys.readouterr().out == f"mnist: in {shared / 'data' / 'mnist'}, 4 files as published\n"


def test_what_cannot_be_fetched_is_told_with_its_address_and_place(root, monkeypatch):
    def offline(remote, folder, on_message=None):
        raise DataError(f"{remote.name} could not be fetched: its server cannot be reached")

    monkeypatch.setattr(prepare, "fetch", offline)
    said = expect_cli_error(None, "datasets", "--data-dir", root, "get", "svhn")
    assert "http://ufldl.stanford.edu/housenumbers" in said and f"{root}/svhn" in said
