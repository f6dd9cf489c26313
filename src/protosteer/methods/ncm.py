"""Nearest class mean on the frozen backbone, Sec. 3.2: nothing is trained. Also with several centroids per class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protosteer.errors import SettingsError
from protosteer.methods.cpp import CPP
from protosteer.settings import Settings, unknown_setting

# All that a method without training can be told; `neighbours` decides which tasks count as retrieved.
KNOWN = ("centroids", "clustering", "assign_labels", "neighbours", "embed_batch_size", "seed")


class NCM(CPP):
    name = "ncm"

    @staticmethod
    def settings_from(values: Mapping[str, Any]) -> Settings:
        for key in values:
            if key not in KNOWN:
                raise SettingsError(f"method ncm trains nothing: {unknown_setting(key, KNOWN)}")
        return Settings.from_dict({"centroids": 1, **values, "prompts": False})

    @classmethod
    def preset(cls, name: str, depth: int) -> dict[str, Any]:
        return super(CPP, cls).preset(name, depth)  # nothing is trained, so nothing to make quicker
