"""How threads wait for each other: training steps on nano with two threads, alone and beside a busy process.

A waiting thread of libgomp spins for a while before it sleeps. Where another process wants its core, the spinning
holds up the very thread that is waited for. Only the second half means anything while the machine is busy.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from statistics import median

import torch

from benchmarks.tools import normalised, prompts, ratio, step
from benchmarks.workers import Job, Worker, busy_core, own_times, together
from protosteer.backbones import Backbone
from protosteer.bench.timing import Ratio

BATCH, STEPS, THREADS = 64, 4, 2
DEFAULT = "default"
UNSET: dict[str, str | None] = {"GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": None}
POLICIES = {
    DEFAULT: UNSET,
    "spincount_5000": UNSET | {"GOMP_SPINCOUNT": "5000"},
    "passive": UNSET | {"OMP_WAIT_POLICY": "PASSIVE"},
}


def steps() -> Job:
    """A job for a worker."""
    torch.set_num_threads(THREADS)
    backbone = Backbone.load("nano")
    images, prompt = normalised(backbone, BATCH), prompts(backbone.vit, 1)[0].requires_grad_()
    return lambda: [step(backbone.vit, images, prompt) for _ in range(STEPS)]


def run(repeats: int) -> list[Ratio]:
    with ExitStack() as stack:
        workers = {policy: stack.enter_context(Worker(steps, env=env)) for policy, env in POLICIES.items()}
        sides = {policy: partial(together, [worker]) for policy, worker in workers.items()}
        alone = own_times(sides, repeats)
        with busy_core():
            beside = own_times(sides, repeats)
    return [*_ratios("alone", alone, alone), *_ratios("busy", beside, alone)]


def _ratios(where: str, times: dict[str, list[float]], alone: dict[str, list[float]]) -> list[Ratio]:
    place = "alone" if where == "alone" else "beside one busy process"
    ratios = []
    for policy in list(POLICIES)[1:]:
        notes = []
        if where == "busy":
            slower = {name: median(times[name]) / median(alone[name]) for name in (DEFAULT, policy)}
            notes = [f"against alone: default x {slower[DEFAULT]:.1f}, {policy} x {slower[policy]:.1f}"]
        about = f"nano, training steps of {BATCH} images, {THREADS} threads, {place}: libgomp's default / {policy}"
        name = f"wait_{policy}_{where}"
        ratios.append(ratio(name, about, times[DEFAULT], times[policy], BATCH * STEPS, notes))
    return ratios
