"""Select the executor (local or Ray) and write prediction tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protosteer.cli.common import CommandLineError, make_console, say, sigterm_as_ctrl_c
from protosteer.cli.loading import refuse_existing

if TYPE_CHECKING:
    from protosteer.runtime.executor import Executor
    from protosteer.workflows.prediction_table import RowMaker


def make_executor(name: str, address: str | None, device: str = "auto") -> Executor:
    """Return the executor that `--engine` names."""
    from protosteer.runtime.executor import LocalExecutor

    if name == "local":
        if address is not None:
            raise CommandLineError(
                "--address is that of a Ray cluster; add --engine ray", code="address-without-ray"
            )
        return LocalExecutor()
    if name != "ray":
        raise CommandLineError(
            f"engine {name!r} is not known; choose local or ray", code="unknown-engine", name=name
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise CommandLineError(
            "--engine ray and torchrun exclude each other; start the command without torchrun",
            code="ray-under-torchrun",
        )
    from protosteer.runtime.ray_executor import RayExecutor

    return RayExecutor(address, device)


def check_out(out: str, engine: str) -> None:
    """Reject an --out that cannot be written, before any work is done for it."""
    from protosteer.data.image_lists import SUFFIXES
    from protosteer.workflows.prediction_table import is_table

    if is_table(out):
        if engine != "local":
            raise CommandLineError(
                f"--out {out} is one file; with --engine {engine} name a folder, for one file per shard",
                code="one-file-with-engine",
                path=out,
            )
        if "://" in out:
            raise CommandLineError(
                f"--out {out} is one file elsewhere; name a folder there, for one file per shard",
                code="one-file-elsewhere",
                path=out,
            )
        refuse_existing(Path(out))
    elif Path(out).suffix and not ("://" in out or out.endswith("/") or Path(out).is_dir()):
        raise CommandLineError(
            f"--out {out} is neither a folder nor a file that ends in {', '.join(SUFFIXES)}",
            code="bad-suffix",
            path=out,
        )


def put_table(
    maker: RowMaker,
    make_remote: Callable[[], RowMaker],
    about: Sequence[Any],
    files: Sequence[Path],
    out: str,
    shard: int,
    engine: Executor,
) -> None:
    """Write the rows of all files to one file, or to a folder with a file per shard."""
    from protosteer.util.files import writing
    from protosteer.util.text import counted
    from protosteer.workflows.prediction_table import is_table, write_table
    from protosteer.workflows.sharded_predict import write_shards

    names = [str(path) for path in files]
    with sigterm_as_ctrl_c(), _bar(maker.kind, len(names)) as on_progress:
        if is_table(out):
            bad = 0

            def rows() -> Iterator[Any]:
                nonlocal bad
                for done, row in enumerate(maker.rows(names), 1):
                    bad += "error" in row
                    yield row
                    on_progress(done, len(names))

            with writing(Path(out), "--out"):
                write_table(Path(out), maker, rows())
            what = ""
        else:
            try:
                counts = write_shards(engine, maker, make_remote, about, names, out, shard, on_progress)
            except KeyboardInterrupt:
                say(f"stopped; {out} keeps the shards that are done, and the same command goes on")
                raise
            bad, what = counts.unreadable, f", {counted(counts.written, 'shard')} made"
            what += f", {counts.complete} there already" if counts.complete else ""
    if bad:
        say(f"warning: {counted(bad, 'file')} could not be read; the column error says why")
    say(f"Written: {out}: {counted(len(names), 'row')}{what}")


@contextmanager
def _bar(kind: str, total: int) -> Iterator[Callable[[int, int], None]]:
    from protosteer.report.progress import LearnProgress
    from protosteer.runtime.progress import Stage

    with LearnProgress(make_console(stderr=True)) as progress:
        yield lambda done, of: progress.on_stage(Stage("", kind, done, of))
