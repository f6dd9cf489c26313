"""Methods that can be run and compared, one file each, behind the contract of `base.py`."""

from __future__ import annotations

from protosteer.errors import SettingsError
from protosteer.methods.aper import APER
from protosteer.methods.base import Answer, Images, Method, Source, TaskData
from protosteer.methods.bic import BiC
from protosteer.methods.co2l import Co2L
from protosteer.methods.coda_prompt import CODAPrompt
from protosteer.methods.cpp import CPP
from protosteer.methods.derpp import DERpp
from protosteer.methods.dualprompt import DualPrompt
from protosteer.methods.ease import EASE
from protosteer.methods.er import ER
from protosteer.methods.esn import ESN
from protosteer.methods.ewc import EWC
from protosteer.methods.fecam import FeCAM
from protosteer.methods.finetune import Finetune
from protosteer.methods.gdumb import GDumb
from protosteer.methods.icarl import ICaRL
from protosteer.methods.joint import Joint
from protosteer.methods.knn import KNN
from protosteer.methods.l2p import L2P
from protosteer.methods.lwf import LwF
from protosteer.methods.ncm import NCM
from protosteer.methods.pass_ import PASS
from protosteer.methods.probe import Probe
from protosteer.methods.protosteer import Protosteer
from protosteer.methods.ranpac import RanPAC
from protosteer.methods.s_prompts import SPrompts
from protosteer.methods.slca import SLCA
from protosteer.methods.slda import SLDA
from protosteer.util.text import suggestion

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        *(Protosteer, CPP),
        *(NCM, KNN, SLDA, FeCAM, RanPAC),  # frozen features
        *(APER, EASE, L2P, DualPrompt, CODAPrompt, SPrompts, ESN),  # prompts and adapters
        *(EWC, LwF, PASS, SLCA),  # the whole backbone
        *(ER, DERpp, ICaRL, GDumb, BiC, Co2L),  # and a buffer
        *(Finetune, Joint, Probe),  # bounds
    )
}


def find_method(name: str) -> type[Method]:
    if name not in METHODS:
        raise SettingsError(f"no method is called '{name}'; {suggestion(name, METHODS)}")
    return METHODS[name]


__all__ = ["METHODS", "Answer", "Images", "TaskData", "Method", "Source", "find_method"]
