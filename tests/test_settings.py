from __future__ import annotations

import dataclasses

import pytest

from protosteer.errors import SettingsError
from protosteer.settings import Settings


def test_defaults_are_the_papers():
    s = Settings()
    assert (s.epochs, s.batch_size, s.learning_rate, s.final_learning_rate) == (50, 256, 1e-3, 1e-6)
    assert (s.weight_decay, s.final_weight_decay, s.gradient_clip) == (5e-4, 1e-2, 5.0)
    assert (s.centroids, s.neighbours, s.temperature) == (5, 3, 0.6)
    assert (s.prompt_length, s.prompt_kind, s.neck_layers, s.neck_hidden) == (1, "deep", 3, 2048)


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


def test_unknown_key_suggests_the_nearest_name():
    with pytest.raises(SettingsError, match="unknown setting 'epoch'; did you mean 'epochs'"):
        Settings.from_dict({"epoch": 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs = 0: must be at least 1"),
        ({"epochs": 2.5}, "epochs = 2.5: must be int"),
        ({"epochs": True}, "must be int, not bool"),
        ({"temperature": 0.0}, "temperature = 0.0: must be greater than 0"),
        ({"temperature": float("nan")}, "finite"),
        ({"noise": "loud"}, "noise = 'loud': choose one of cluster, class, none"),
        ({"prototypes_per_step": -2}, "prototypes_per_step = -2"),
    ],
)
def test_impossible_values_are_refused_by_name(change, message):
    with pytest.raises(SettingsError, match=message):
        Settings(**change)


def test_a_retired_name_is_read_from_files_alone():
    old = {**Settings(epochs=3).to_dict(), "cached_views": 4}
    assert Settings.from_file(old) == Settings(epochs=3)
    with pytest.raises(SettingsError, match="unknown setting 'cached_views'"):
        Settings.from_dict(old)
    with pytest.raises(SettingsError, match="unknown setting 'epoch'"):
        Settings.from_file({"epoch": 3})


def test_presets():
    assert Settings.preset("paper") == Settings()
    best, fast = Settings.preset("best"), Settings.preset("fast", epochs=7)
    assert best.rule == fast.rule == "evidence"
    assert (best.prompt_tasks, fast.prompt_tasks, fast.epochs) == ("all", "first", 7)
    assert not Settings.preset("instant").prompts
    with pytest.raises(SettingsError, match="preset 'quick' is unknown; choose one of best, fast"):
        Settings.preset("quick")


def test_a_preset_over_settings_keeps_what_no_preset_is_about():
    mine = Settings.preset("fast", epochs=3, independent=True, seed=4, prompt_length=2)
    kept = {"independent": True, "seed": 4, "prompt_length": 2}
    for name in ("best", "fast", "instant", "paper"):
        assert mine.under(name) == Settings.preset(name, **kept)


def test_every_string_setting_has_choices():
    for field in dataclasses.fields(Settings):
        if field.type == "str":
            with pytest.raises(SettingsError, match=field.name):
                Settings(**{field.name: "no such choice"})


@pytest.mark.parametrize(
    ("text", "message"), [("epochs = ", "not valid TOML"), ("epoch = 1", "did you mean")]
)
def test_bad_files_are_named(tmp_path, text, message):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(SettingsError, match=f"bad.toml.*{message}"):
        Settings.from_toml(tmp_path / "bad.toml")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(SettingsError, match="cannot read .*none.toml"):
        Settings.from_toml(tmp_path / "none.toml")
