import dataclasses

import pytest

from conftest import tiny_backbone
from expect import expect_error
from protosteer.errors import SettingsError
from protosteer.learner import Learner
from protosteer.methods.cpp import CPP
from protosteer.settings import PAPER_PRESETS, PRESETS, Settings


def test_the_papers_settings():
    s = Settings.preset("paper")
    assert (s.epochs, s.batch_size, s.learning_rate, s.final_learning_rate) == (50, 256, 1e-3, 1e-6)
    assert (s.weight_decay, s.final_weight_decay, s.gradient_clip) == (5e-4, 1e-2, 5.0)
    assert (s.centroids, s.neighbours, s.temperature) == (5, 3, 0.6)
    assert (s.prompt_length, s.prompt_kind, s.neck_layers, s.neck_hidden) == (1, "deep", 3, 2048)
    assert s.rule == "paper"


def test_the_default_is_the_preset_fast_everywhere():
    assert Settings() == Settings.preset("fast") == Learner(tiny_backbone()).settings
    assert Learner(tiny_backbone(), Settings(epochs=5)).settings == Settings.preset("fast", epochs=5)
    assert (Settings().rule, Settings().epochs, Settings().batch_size) == ("evidence", 15, 50)


def test_method_cpp_runs_with_the_papers_settings():
    for name in (None, *PAPER_PRESETS):
        assert CPP.settings_from({**CPP.preset(name), "epochs": 3}) == Settings.preset(name or "paper", epochs=3)
    with expect_error("unknown-preset", SettingsError, name="fast"):
        CPP.preset("fast")


def test_the_two_readings_of_the_paper():
    between = Settings.preset("paper")
    assert Settings.preset("paper-text") == between.replace(noise="class")
    assert Settings.preset("authors") == between.replace(
        anchor_rows="images+prototypes", prototypes_per_step=256, prompt_start="zero-then-previous"
    )


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().epochs = 3  # type: ignore[misc]


def test_toml_round_trip(tmp_path):
    settings = Settings(epochs=3, temperature=0.25, loss="supcon", independent=True)
    settings.to_toml(tmp_path / "s.toml")
    assert Settings.from_toml(tmp_path / "s.toml") == settings


def test_toml_keeps_defaults_for_absent_names(tmp_path):
    (tmp_path / "s.toml").write_text("epochs = 7\nlearning_rate = 1\n")
    assert Settings.from_toml(tmp_path / "s.toml") == Settings(epochs=7, learning_rate=1.0)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"epoch": 3}, "unknown-setting"),
        ({"epochs": 0}, "setting-out-of-bounds"),
        ({"epochs": 2**70}, "setting-out-of-bounds"),
        ({"epochs": 2.5}, "wrong-setting-type"),
        ({"epochs": True}, "wrong-setting-type"),
        ({"temperature": 0.0}, "setting-out-of-bounds"),
        ({"temperature": float("nan")}, "setting-out-of-bounds"),
        ({"noise": "loud"}, "unknown-choice"),
        ({"prototypes_per_step": -2}, "setting-out-of-bounds"),
    ],
)
def test_impossible_values_are_rejected_by_name(change, code):
    (name,) = change
    with expect_error(code, SettingsError, name=name) as caught:
        Settings.from_dict(change)
    assert name in str(caught.value)


def test_a_shallow_prompt_begins_in_the_first_layer():
    with expect_error("setting-out-of-bounds", SettingsError, name="prompt_from_layer"):
        Settings(prompt_kind="shallow", prompt_from_layer=2)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(SettingsError, match="did you mean 'epochs'"):
        Settings.from_dict({"epoch": 3})


def test_a_file_may_lack_settings_and_name_retired_ones():
    old = {**Settings(epochs=3).to_dict(), "cached_views": 4}
    assert Settings.from_file(old) == Settings(epochs=3)
    assert Settings.from_file({"epochs": 3}) == Settings.preset("paper", epochs=3)
    for read, values in ((Settings.from_dict, old), (Settings.from_file, {"epoch": 3})):
        with expect_error("unknown-setting", SettingsError):
            read(values)


def test_presets():
    best, fast = Settings.preset("best"), Settings.preset("fast", epochs=7)
    assert best.rule == fast.rule == Settings.preset("instant").rule == "evidence"
    assert (best.prompt_tasks, fast.prompt_tasks, fast.epochs) == ("all", "first", 7)
    assert not Settings.preset("instant").prompts
    with expect_error("unknown-preset", SettingsError, name="quick"):
        Settings.preset("quick")


def test_a_preset_over_settings_keeps_what_no_preset_is_about():
    kept = {"independent": True, "seed": 4, "prompt_length": 2}
    mine = Settings.preset("fast", epochs=3, **kept)
    for name in PRESETS:
        assert mine.with_preset(name) == Settings.preset(name, **kept)
    with pytest.deprecated_call():
        assert mine.under("paper") == mine.with_preset("paper")


def test_every_string_setting_has_choices():
    for field in dataclasses.fields(Settings):
        if field.type == "str":
            with expect_error("unknown-choice", SettingsError, name=field.name):
                Settings(**{field.name: "no such choice"})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("epochs = ", "invalid-toml"),
        ("[epochs]", "invalid-toml"),
        ("epoch = 1", "unknown-setting"),
        (None, "unreadable-settings"),
    ],
)
def test_bad_files_are_named(tmp_path, text, code):
    path = tmp_path / "bad.toml"
    if text is not None:
        path.write_text(text)
    with expect_error(code, SettingsError) as caught:
        Settings.from_toml(path)
    assert str(path) in str(caught.value)
