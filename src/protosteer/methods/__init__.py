"""Methods that can be run and compared, one file each, behind the contract of `base.py`."""

from __future__ import annotations

from protosteer.errors import SettingsError
from protosteer.methods.base import Answer, Images, Lesson, Method, Source
from protosteer.methods.bic import BiC
from protosteer.methods.co2l import Co2L
from protosteer.methods.cpp import CPP
from protosteer.methods.ewc import EWC
from protosteer.methods.finetune import Finetune
from protosteer.methods.joint import Joint
from protosteer.methods.lwf import LwF
from protosteer.methods.ncm import NCM
from protosteer.methods.protosteer import Protosteer
from protosteer.methods.ranpac import RanPAC
from protosteer.util.text import suggestion

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Protosteer,
        CPP,
        NCM,
        RanPAC,
        Finetune,
        Joint,
        EWC,
        LwF,
        BiC,
        Co2L,
    )
}


def find_method(name: str) -> type[Method]:
    if name not in METHODS:
        raise SettingsError(f"no method is called '{name}'; {suggestion(name, METHODS)}")
    return METHODS[name]


__all__ = ["METHODS", "Answer", "Images", "Lesson", "Method", "Source", "find_method"]
