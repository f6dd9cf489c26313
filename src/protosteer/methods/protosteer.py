"""The default classifier of this package, docs/explanation/default-classifier.md: what CPP learns, with whitened features and kernel ridge."""

from __future__ import annotations

from typing import Any

from protosteer.evidence.prototype_summary import MAX_PAIRED_PROTOTYPES, MAX_PROTOTYPES
from protosteer.methods.base import Source, register_method
from protosteer.methods.cpp import CPP
from protosteer.settings import DEFAULT_PRESET, preset


@register_method("protosteer")
class Protosteer(CPP):
    """CPP's training with the default classifier."""

    source = Source(
        "protosteer", "The default classifier: docs/explanation/default-classifier.md", "this repository", 2026
    )
    trains = "a prompt, on the first task"
    published = {}
    stored_features = f"up to {MAX_PROTOTYPES} per class, with a prompt {MAX_PAIRED_PROTOTYPES} twice"

    @classmethod
    def preset(cls, name: str | None) -> dict[str, Any]:
        """Return the settings of a preset; None: those of the default."""
        return preset(name or DEFAULT_PRESET)
