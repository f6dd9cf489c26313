"""`protosteer` with an accident, on one rank of a group; not a test itself.

    python torchrun_accidents.py ACCIDENT WORD...

ACCIDENT: "none"; "killed-0", "killed-1": that rank is, after the fourth step of a training, when rank 0 has
written its checkpoint; "unreadable": image files are, for rank 1.
"""

import os
import signal
import sys
from typing import Any

from protosteer.cli import main
from protosteer.data.images import FileImages
from protosteer.errors import DataError
from protosteer.runtime.callbacks import CheckpointCallback
from protosteer.util.distributed import process_group

RANK = os.environ["RANK"]


def killed(self: CheckpointCallback, training: Any) -> None:
    if RANK == "0":
        self.save(training)
    if training.step == 4:
        process_group().broadcast_object(lambda: None)
        if sys.argv[0].endswith(RANK):
            os.kill(os.getpid(), signal.SIGKILL)


def unreadable(self: FileImages, rows: list[int]) -> None:
    raise DataError(f"{self.paths[rows[0]]} cannot be read; see that it is there")


if __name__ == "__main__":
    sys.argv[:2] = [sys.argv[1]]
    if sys.argv[0].startswith("killed"):
        CheckpointCallback.on_step_end = killed  # type: ignore[method-assign]
    if sys.argv[0] == "unreadable" and RANK == "1":
        FileImages.pixels = unreadable  # type: ignore[assignment,method-assign]
    sys.exit(main())
