"""Objects from outside the package: in a Python file (`path/to/file.py:Name`), or of an installed package.

Both run code of their author, as any import does.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

from protosteer.errors import ProtosteerError, SettingsError
from protosteer.util.text import listed, one_line

SUFFIX = ".py:"


def is_file_spec(name: str) -> bool:
    """Return whether a name has the form `path/to/file.py:Name`, or names the file alone, which is an error."""
    return SUFFIX in name or name.endswith(SUFFIX[:-1])


def load_from_file(spec: str) -> Any:
    """Import a Python file, once per process, and return the object that `path/to/file.py:Name` names.

    Raises:
        SettingsError: There is no such file (code "no-plugin-file") or name (code "no-plugin-name"), or the file raises
            an error (code "broken-plugin").
    """
    place, name = spec.rsplit(":", 1) if SUFFIX in spec else (spec, "")
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise SettingsError(f"{place} does not exist; write path/to/file.py:Name", code="no-plugin-file", path=path)
    module_name = f"protosteer_plugin_{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"
    if module_name not in sys.modules:
        module_spec = importlib.util.spec_from_file_location(module_name, path)
        assert module_spec is not None and module_spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(module_spec)
        try:
            module_spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[module_name]
            if not isinstance(error, Exception) or isinstance(error, ProtosteerError):
                raise
            raise _import_error(place, error) from error
    module = sys.modules[module_name]
    if not name or not hasattr(module, name):
        names = listed([key for key, value in vars(module).items() if _is_own(module_name, key, value)], 5)
        wrong = f"{place} has no {name!r}" if name else f"{place}: write path/to/file.py:Name"
        raise SettingsError(f"{wrong}; it has {names}", code="no-plugin-name", name=name)
    return getattr(module, name)


def _is_own(module: str, name: str, value: Any) -> bool:
    """Return whether a name of a module is public and was not imported."""
    imported = inspect.ismodule(value) or (callable(value) and getattr(value, "__module__", module) != module)
    return not name.startswith("_") and not imported and name != "annotations"


def entry_point_names(group: str) -> list[str]:
    """Return the names that installed packages register in a group of entry points."""
    return sorted(point.name for point in metadata.entry_points(group=group))


def load_entry_point(group: str, name: str) -> Any:
    """Return what an installed package registers under a name; None if no package does.

    Raises:
        SettingsError: It cannot be imported (code "broken-plugin").
    """
    point = next(iter(metadata.entry_points(group=group, name=name)), None)
    if point is None:
        return None
    try:
        return point.load()
    except ProtosteerError:
        raise
    except Exception as error:
        raise _import_error(f"entry point {name} = {point.value}", error) from error


def _import_error(place: str, error: Exception) -> SettingsError:
    message = f"{place} cannot be imported: {type(error).__name__}: {one_line(str(error))}; repair it"
    return SettingsError(message, code="broken-plugin", place=place)
