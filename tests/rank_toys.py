"""Start a group of processes as torchrun would, for tests. The store is in this process, as in torchrun's."""

import os
import subprocess
import sys
from pathlib import Path

from torch.distributed import TCPStore

TESTS = Path(__file__).resolve().parent
# Until a test gives up: far more than a busy machine needs, less than a group waits for a silent process.
SECONDS = 900.0


def environment(**more: object) -> dict[str, str]:
    """For a process that can import modules of the tests."""
    paths = [str(TESTS), str(TESTS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    more |= {"OMP_NUM_THREADS": 1, "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **{name: str(value) for name, value in more.items()}}


def run_ranks(size: int, script: Path, *words: object) -> list[tuple[int, str, str]]:
    """Run a script on every rank; returns exit code, standard output and standard error of each."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, words)],
            env=environment(
                TORCHELASTIC_RUN_ID="test",
                TORCHELASTIC_USE_AGENT_STORE=True,
                TORCHELASTIC_RESTART_COUNT=0,
                RANK=rank,
                LOCAL_RANK=rank,
                WORLD_SIZE=size,
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=store.port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in group]
    finally:
        for process in group:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(group, outputs, strict=True)]
