"""Methods that can be run and compared, one file each, behind the contract of `base.py`."""

from __future__ import annotations

import difflib

from protosteer.errors import SettingsError
from protosteer.methods.base import Answer, Images, Method
from protosteer.methods.cpp import CPP
from protosteer.methods.ncm import NCM

METHODS: dict[str, type[Method]] = {method.name: method for method in (CPP, NCM)}


def find_method(name: str) -> type[Method]:
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(METHODS)}"
        raise SettingsError(f"no method is called '{name}'; {hint}")
    return METHODS[name]


__all__ = ["METHODS", "Answer", "Images", "Method", "find_method"]
