"""A backbone by name: its weights, the preprocessing that belongs to them, and their fingerprint."""

from protosteer.backbones.backbone import Backbone
from protosteer.backbones.hub import find_weights, list_backbones
from protosteer.backbones.registry import AUTO, IMAGENET, MINI, NANO, BackboneInfo, full_name

__all__ = [
    "AUTO",
    "IMAGENET",
    "MINI",
    "NANO",
    "Backbone",
    "BackboneInfo",
    "find_weights",
    "full_name",
    "list_backbones",
]
