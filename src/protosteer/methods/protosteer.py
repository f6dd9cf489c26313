"""Prediction by evidence, docs/beyond.md: what CPP learns, read better."""

from __future__ import annotations

from typing import Any

from protosteer.methods.base import Source
from protosteer.methods.cpp import CPP
from protosteer.settings import preset


class Protosteer(CPP):
    name = "protosteer"
    source = Source("protosteer", "Prediction by evidence: docs/beyond.md", "this repository", 2026)

    @classmethod
    def preset(cls, name: str | None) -> dict[str, Any]:
        return preset(name or "best")
