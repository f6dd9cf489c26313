"""Methods that can be run and compared, one file each, behind the contract of `base.py`.

Every module of this package is imported, so a file with `@register_method("name")` is all that a method needs.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pkgutil import iter_modules

from protosteer.errors import ProtosteerWarning, SettingsError
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
from protosteer.util.plugins import entry_point_names, is_file_spec, load_entry_point, load_from_file
from protosteer.util.text import suggestion

__all__ = [
    "ENTRY_POINTS", "METHODS", "Answer", "Images", "Method", "Source", "TrainingTask",
    "find_method", "load_plugins", "register_method", "unregister_method",
]  # fmt: skip

ENTRY_POINTS = "protosteer.methods"

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
_OURS = frozenset(METHODS)


def find_method(name: str) -> type[Method]:
    """Return the method of this name, of an installed package, or of a file (`path/to/file.py:Class`).

    Raises:
        SettingsError: There is none (code "unknown-method"), or it is no method (code "not-a-method").
    """
    if name in METHODS:
        return METHODS[name]
    plugin = load_from_file(name) if is_file_spec(name) else load_entry_point(ENTRY_POINTS, name)
    if plugin is None:
        known_names = [*METHODS, *entry_point_names(ENTRY_POINTS)]
        message = f"no method is called '{name}'; {suggestion(name, known_names)}"
        raise SettingsError(message, code="unknown-method", name=name)
    if not isinstance(plugin, type) or not issubclass(plugin, Method):
        raise SettingsError(f"{name} is not a subclass of protosteer.methods.Method", code="not-a-method", name=name)
    # A class without the decorator is called as the entry point is, or as itself.
    method_name = plugin.__dict__.get("name") or (plugin.__name__.lower() if is_file_spec(name) else name)
    return register_method(method_name)(plugin)


def load_plugins() -> None:
    """Register the methods of all installed packages, which `find_method` finds one by one; warn of those left out."""
    for name in entry_point_names(ENTRY_POINTS):
        if name in _OURS:
            message = (
                f"the entry point {name} of an installed package is not used: a method of protosteer has that name"
            )
            warnings.warn(message, ProtosteerWarning, stacklevel=2)
            continue
        try:
            find_method(name)
        except SettingsError as error:
            warnings.warn(str(error), ProtosteerWarning, stacklevel=2)
