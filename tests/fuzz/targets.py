"""What is fuzzed. A file test_fuzz_NAME.py puts its targets into `TARGETS`; tests and tools/fuzz.py try them.

    TARGETS["images"] = Target(seeds, check)

    def test_images() -> None:
        try_out("images", examples=200)

An input that ever failed lies in failures/NAME/ and is tried again by every test, before new ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

FAILURES = Path(__file__).parent / "failures"
# Numbers that sizes, offsets and counts are wrong at, and bytes that formats give a meaning to.
_TELLING = [b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff" * 4, b"\x00" * 4, b"\x00\x00\x00\x80", b"\x7f" + b"\xff" * 7]
_TELLING += [b"-1", b"9" * 30, b"1e999", b"NaN", b"null", b"{}", b"[", b'"', b"\n", b"\x1b[2J", b"/../", b"undefined"]


def mutate(data: bytes, random: Random) -> bytes:
    """One to eight changes: bits, telling values, parts lost, doubled, moved, or the end cut off."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 4, 8])):
        start = random.randrange(len(changed) + 1)
        end = min(len(changed), start + random.choice([1, 2, 4, 16, 256]))
        kind = random.randrange(6)
        if kind == 0 and start < end:
            changed[start] ^= 1 << random.randrange(8)
        elif kind == 1:
            value = random.choice(_TELLING)
            changed[start : start + random.choice([0, len(value)])] = value
        elif kind == 2:
            del changed[start:end]
        elif kind == 3:
            changed[start:start] = changed[start:end]
        elif kind == 4:
            other = random.randrange(len(changed) + 1)
            changed[start:end] = changed[other : other + end - start]
        elif kind == 5 and random.randrange(4) == 0:
            del changed[start:]
    return bytes(changed)


@dataclass(frozen=True)
class Target:
    """check: returns where the input is used, or refused as documented; all else that it raises is a failure.

    It must need neither a network nor more than a few seconds and some hundred megabytes for any input.
    mutate: how inputs are made from seeds, for formats that hardly survive a changed byte.
    """

    seeds: Callable[[], Sequence[bytes]]
    check: Callable[[bytes], None]
    mutate: Callable[[bytes, Random], bytes] = mutate


TARGETS: dict[str, Target] = {}


def try_out(name: str, examples: int = 200) -> None:
    """The seeds, the inputs that once failed, and so many new ones, the same in every run."""
    target = TARGETS[name]
    seeds = target.seeds()
    for known in [*seeds, *(path.read_bytes() for path in sorted((FAILURES / name).glob("*")))]:
        target.check(known)

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(seeds), st.integers(0, 2**32 - 1))
    def check(seed: bytes, number: int) -> None:
        target.check(target.mutate(seed, Random(number)))

    check()
