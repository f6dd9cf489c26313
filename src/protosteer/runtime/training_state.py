"""A training between two steps as tensors and plain data, for a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from protosteer.paper.trainer import Epoch, TrainingState


def state_dict(state: TrainingState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `load_state_dict` needs, between two steps, beside parameters, optimiser and random state."""
    tensors = {"order": torch.stack(state.batches), "seen": torch.cat(state.embeddings)}
    history = [dataclasses.astuple(epoch) for epoch in state.history]
    return tensors, {"history": history, "losses": state.losses}


def load_state_dict(state: TrainingState, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Continue where the state that `state_dict` described was."""
    state.history = [Epoch(*epoch) for epoch in notes["history"]]
    state.losses = list(notes["losses"])
    state.batches, state.embeddings = list(tensors["order"]), [tensors["seen"]]
