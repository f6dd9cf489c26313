"""Try the fuzzing targets of tests/fuzz for as long as you like: python tools/fuzz.py --minutes 60 [NAME...]

Each target is tried in a process of its own, so that a crash, a hang or a lack of memory is survived. An input that
raises what it must not, takes more than 5 seconds of processor time, or brings the process above 1.5 GB is kept in
tests/fuzz/failures/NAME/, where the tests find it. The exit code is 1 if there was one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import math
import multiprocessing
import os
import resource
import secrets
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
SLOW = 5.0  # seconds of processor time for one input, so that a busy machine is no failure
HUNG, SILENT = 20.0, 300.0  # after so much processor time, or so much time, the process is ended
LARGE = 1_500_000_000  # bytes of a process
TOO_LARGE = 3  # exit code

Context = multiprocessing.get_context("fork")


@dataclass
class Shared:
    """What the parent can still see when the process that tries inputs is gone."""

    current: Path  # the input under trial
    num_inputs: Any  # a shared number: inputs so far
    begun: Any  # a shared number: the process's processor time when the one under trial began
    failed: Any  # a shared number: failures so far


def targets() -> dict[str, Any]:
    """All that the files of tests/fuzz define, by name."""
    sys.path[:0] = [str(TESTS), str(TESTS / "fuzz")]
    for path in sorted((TESTS / "fuzz").glob("test_fuzz_*.py")):
        importlib.import_module(path.stem)
    registry: dict[str, Any] = importlib.import_module("targets").TARGETS
    return registry


def keep(name: str, data: bytes, reason: str) -> None:
    folder = TESTS / "fuzz" / "failures" / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    print(f"{name}: {reason}; kept as {path}", flush=True)


def work(name: str, target: Any, seed: int, until: float, shared: Shared) -> None:
    """Try inputs until the time is over; one failure per place in the code is kept."""
    random, seeds, places, is_first = Random(seed), target.seeds(), set(), True
    while time.time() < until:
        data = target.mutate(random.choice(seeds), random)
        shared.current.write_bytes(data)
        shared.begun.value = begun = time.process_time()
        try:
            target.check(data)
        except Exception as error:
            place = (type(error), *(frame.lineno for frame in traceback.extract_tb(error.__traceback__)[-2:]))
            shared.failed.value += 1
            if place not in places:
                places.add(place)
                traceback.print_exc()
                keep(name, data, f"{type(error).__name__} {error}"[:200])
        shared.num_inputs.value += 1
        if (seconds := time.process_time() - begun) > SLOW and not is_first:  # which imports what is imported late
            shared.failed.value += 1
            keep(name, data, f"it took {seconds:.1f} s")
        is_first = False
        if peak_bytes() > LARGE:
            os._exit(TOO_LARGE)


def processor_seconds(process: int | None) -> float:
    """What a process has used; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def watch(name: str, target: Any, seed: int, until: float, shared: Shared) -> None:
    """One process after the other until the time is over; what ended one before that is a failure."""
    while time.time() < until:
        shared.begun.value = math.inf  # the first input is yet to begin
        process = Context.Process(target=work, args=(name, target, seed, until, shared))
        process.start()
        count, changed_at = -1, time.time()
        while process.is_alive() and processor_seconds(process.pid) - shared.begun.value < HUNG:
            process.join(0.2)
            if shared.num_inputs.value != count:
                count, changed_at = shared.num_inputs.value, time.time()
            if time.time() - changed_at > SILENT:
                break
        hung = process.is_alive()
        if hung:
            process.kill()
        process.join()
        if process.exitcode != 0:
            reason = "it hangs" if hung else f"the process ended with {process.exitcode}"
            reason = f"more than {LARGE:,} bytes were taken" if process.exitcode == TOO_LARGE else reason
            shared.failed.value += 1
            keep(name, shared.current.read_bytes(), reason)
        seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="targets (default: all)")
    parser.add_argument("--minutes", type=float, default=10, help="for all together")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    registry = targets()
    names = options.names or sorted(registry)
    if unknown_names := [name for name in names if name not in registry]:
        parser.error(f"there is no {unknown_names[0]}; choose from {', '.join(sorted(registry))}")
    print(f"seed {options.seed}; {options.minutes:g} minutes for {', '.join(names)}", flush=True)
    num_failures = num_inputs = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            counts = (Context.Value("Q", 0), Context.Value("d", time.time()), Context.Value("Q", 0))
            shared = Shared(Path(folder, "current"), *counts)
            begun = time.time()
            watch(name, registry[name], options.seed, begun + 60 * options.minutes / len(names), shared)
            seconds = time.time() - begun
            print(
                f"{name}: {shared.num_inputs.value:,} inputs in {seconds:.0f} s, {shared.failed.value} failures",
                flush=True,
            )
            num_failures, num_inputs = num_failures + shared.failed.value, num_inputs + shared.num_inputs.value
    print(f"{num_inputs:,} inputs, {num_failures} failures", flush=True)
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
