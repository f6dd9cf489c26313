"""Methods that can be run and compared, one file each, behind the contract of `base.py`.

Every module of this package is imported, so a file with `@register_method("name")` is all that a method needs.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from protosteer.errors import SettingsError
from protosteer.methods.base import (
    METHODS,
    Answer,
    Images,
    Method,
    Source,
    TrainingTask,
    register_method,
    unregister_method,
)
from protosteer.util.text import suggestion

__all__ = [
    "METHODS", "Answer", "Images", "Method", "Source", "TrainingTask",
    "find_method", "register_method", "unregister_method",
]  # fmt: skip

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def find_method(name: str) -> type[Method]:
    """Return the method of this name; raises SettingsError (code "unknown-method") if there is none."""
    if name not in METHODS:
        raise SettingsError(
            f"no method is called '{name}'; {suggestion(name, METHODS)}", code="unknown-method", name=name
        )
    return METHODS[name]
