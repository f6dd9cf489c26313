"""`protosteer` with an accident, as one of the processes of a group; not a test itself.

    python torchrun_accidents.py ACCIDENT WORD...

ACCIDENT: "none"; "killed": the leader is, when a training's fourth step is kept; "unreadable": files are, for
helpers.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from protosteer.cli import main
from protosteer.data.images import FileImages
from protosteer.errors import DataError
from protosteer.runtime.checkpoint import CheckpointCallback


def killed(self: CheckpointCallback, training: Any) -> None:
    self.keep(training)
    if training.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)


def unreadable(self: FileImages, rows: list[int]) -> None:
    raise DataError(f"{self.paths[rows[0]]} cannot be read; see that it is there")


if __name__ == "__main__":
    accident = sys.argv.pop(1)
    if accident == "killed":
        CheckpointCallback.on_step_end = killed  # type: ignore[method-assign]
    if accident == "unreadable" and os.environ["RANK"] != "0":
        FileImages.pixels = unreadable  # type: ignore[assignment,method-assign]
    sys.exit(main())
