"""Rules: how classes are stored and predicted. `RULES` has them by the value of the setting `rule`."""

from __future__ import annotations

from protosteer.model.memory import Memory
from protosteer.rules.base import Embeddings, Exported, Reader, Rule
from protosteer.rules.evidence import EvidenceReader, EvidenceRule
from protosteer.rules.paper import PaperReader, PaperRule
from protosteer.settings import Settings

__all__ = [
    "RULES", "Embeddings", "EvidenceReader", "EvidenceRule", "Exported", "PaperReader", "PaperRule", "Reader", "Rule",
    "reader_of",
]  # fmt: skip

RULES: dict[str, Rule] = {"paper": PaperRule(), "evidence": EvidenceRule()}


def reader_of(memory: Memory, settings: Settings) -> Reader:
    """Build the reader of a memory by the rule of the settings."""
    return RULES[settings.rule].reader(memory, settings)
