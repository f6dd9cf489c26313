"""`protosteer methods`: what there is, all about one, one line for mistakes."""

import json

import pytest
from rich.console import Console

from expect import expect_cli_error, run_cli
from protosteer.evaluation import method_info
from protosteer.evaluation.method_info import describe, first_task_parameters
from protosteer.evidence.prototype_summary import MAX_PAIRED_PROTOTYPES, MAX_PROTOTYPES
from protosteer.methods import METHODS
from protosteer.methods.finetune import Finetune
from protosteer.methods.ncm import NCM, NCMSettings
from protosteer.methods.testing import toy_backbone

FEW = ("cpp", "ncm", "ranpac", "finetune")


@pytest.fixture
def few(monkeypatch):
    """Fewer methods, so that counting takes no time."""
    for name in [name for name in METHODS if name not in FEW]:
        monkeypatch.delitem(METHODS, name)


def test_the_list_names_all_in_80_columns(few, capsys, monkeypatch):
    monkeypatch.setattr("protosteer.cli.catalogue.make_console", lambda stderr=False: Console(width=80))
    out, errors = run_cli(capsys, "methods")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in out
    rows = {line.split()[0]: line for line in lines if line.strip()}
    assert set(rows) >= set(FEW)
    assert "Li et al., WACV 2024" in rows["cpp"] and "a prompt per task" in rows["cpp"]
    assert rows["ncm"].split()[-2:] == ["nothing", "0"] and rows["finetune"].split()[-1] == "623,370"
    assert "cpp, finetune, ncm, ranpac." in out
    assert "protosteer methods NAME" in errors and "10 classes on nano" in errors


def test_one_is_shown_in_full(capsys):
    out = run_cli(capsys, "methods", "ncm").out
    assert NCM.source.title in out and "Nothing is trained. A class is the mean" in out
    words = [line.split() for line in out.splitlines()]
    assert ["centroids", "1"] in words and ["clustering", "spectral", "spectral,", "kmeans"] in words
    assert not [line for line in words if line[:1] == ["seed"]], "a run has seeds"


def test_json_has_the_same(few, capsys):
    told = {row["name"]: row for row in json.loads(run_cli(capsys, "methods", "--json").out)["methods"]}
    assert set(told) == set(FEW) and told["finetune"]["trained_parameters"] == 623370
    assert (
        told["ncm"]["supports_repeated_classes"] is True
        and told["ncm"]["source"]["year"] == 2013
        and told["ncm"]["settings"]["centroids"] == 1
    )
    assert json.loads(run_cli(capsys, "methods", "ncm", "--json").out) == told["ncm"]


def test_an_unknown_name_is_one_line_with_the_nearest():
    assert "'ranpac'" in expect_cli_error(None, "methods", "ranpca")


def test_rehearsal_is_told_by_what_a_method_declares():
    class Buffered(NCMSettings):
        buffer_size = 2000

    kinds = {
        "no": {},
        "all images": {"state_grows": True, "uses_rehearsal": True},
        "2,000 images": {"uses_rehearsal": True, "settings_class": Buffered},
    }
    for words, declared in kinds.items():
        assert describe(type("Declared", (NCM,), declared)).rehearsal == words


def test_published_settings_are_shown_with_their_source(capsys):
    out = run_cli(capsys, "methods", "dualprompt").out
    assert "dualprompt-pytorch" in out and "expert_length=5" in out and "imagenet-r" in out
    told = describe(METHODS["dualprompt"]).to_dict()
    assert told["published"]["imagenet-subset"] == {"epochs": 50} and told["grid"]["learning_rate"][0] == 5e-3
    assert "Published" not in run_cli(capsys, "methods", "slda").out


def test_what_all_trained_methods_do_alike_is_on_each_page():
    assert (
        method_info.COMMON in describe(METHODS["icarl"]).about
        and method_info.COMMON in describe(METHODS["ranpac"]).about
    )
    assert method_info.COMMON not in describe(METHODS["ncm"]).about


def test_stored_features_are_no_secret():
    """The default classifier stores vectors of single images: not their pixels, but not nothing."""
    told = {name: describe(METHODS[name]) for name in ("protosteer", "knn", "cpp", "er")}
    assert {name: (about.rehearsal, about.features) for name, about in told.items()} == {
        "protosteer": ("no", f"up to {MAX_PROTOTYPES} per class, with a prompt {MAX_PAIRED_PROTOTYPES} twice"),
        "knn": ("no", "all"),
        "cpp": ("no", "no"),
        "er": ("500 images", "no"),
    }


def test_parameters_are_those_of_a_first_task_of_ten_classes():
    backbone = toy_backbone()
    trained = backbone.parameters + 10 * (backbone.dim + 1)
    assert first_task_parameters(Finetune, backbone) == trained
    assert first_task_parameters(NCM, backbone) == 0

    class Picky(NCM):
        def learn(self, task):
            raise method_info.ProtosteerError("give more images")

    assert first_task_parameters(Picky, backbone) is None
