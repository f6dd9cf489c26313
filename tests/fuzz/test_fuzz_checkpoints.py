"""CheckpointFiles that were cut off, overwritten or made up: training starts over, goes on, or says why not in one line."""

import functools
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from targets import TARGETS, Target, try_out
from targets import mutate as mutate_bytes
from test_fuzz_models import change_header, change_tensors
from torch import nn

from protosteer.errors import ProtosteerError, ProtosteerWarning
from protosteer.runtime.callbacks import CheckpointCallback
from protosteer.runtime.checkpoint import CheckpointFile
from protosteer.util.tensor_file import pack_tensors, unpack_tensors
from protosteer.util.training_state import Epoch, TrainingState

pytestmark = pytest.mark.slow

WHICH = {"seed": 3, "classes": ["ant", "bee"]}


def toy() -> TrainingState:
    """A training of two numbers, in its second epoch."""
    prompt = nn.Parameter(torch.zeros(2))
    optimiser = torch.optim.AdamW([prompt], lr=0.1)
    state = TrainingState({"prompt": prompt}, optimiser, torch.arange(3), 3, 2, torch.Generator())
    state.history, state.losses = [Epoch(1.0, 50.0, 0.5)], [0.5]
    state.batches, state.embeddings = [torch.arange(3)], [torch.ones(3, 2)]
    prompt.square().sum().backward()
    optimiser.step()
    return state


@functools.cache
def seeds() -> Sequence[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        resume = CheckpointCallback(CheckpointFile(Path(folder) / "b", seconds=0), WHICH)
        resume.save(toy())
        resume.checkpoint.release()
        return [resume.checkpoint.path.read_bytes(), b""]


def mutate(data: bytes, random: Random) -> bytes:
    if not data or random.randrange(2):
        return mutate_bytes(data, random)
    about, tensors = unpack_tensors(data, "it")
    if random.randrange(2):
        change_header(about, random)
    else:
        change_tensors(tensors, random)
    return pack_tensors(about, tensors)


def check(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", ProtosteerWarning)
        checkpoint, training = CheckpointFile(Path(folder) / "b"), toy()
        checkpoint.path.write_bytes(data)
        try:
            CheckpointCallback(checkpoint, WHICH).on_train_begin(training)
            checkpoint.seconds_spent()
            training.remaining_batches()
        except ProtosteerError as error:
            assert "\n" not in str(error)


TARGETS["checkpoints"] = Target(seeds, check, mutate)


def test_checkpoints() -> None:
    try_out("checkpoints", examples=300)
