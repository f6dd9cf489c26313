"""`protosteer verify`: check a certificate of forgetting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument

from protosteer.cli.common import app, make_console, sigterm_as_ctrl_c
from protosteer.cli.loading import PANEL, backbone_of, prepare
from protosteer.cli.options import Device, Json, ModelBackbone, ModelFile, ModelWeights, Precision, Threads, path_of
from protosteer.errors import ProtosteerError


@app.command(rich_help_panel=PANEL)
def verify(
    certificate: Annotated[
        Path,
        Argument(metavar="CERTIFICATE", parser=path_of, show_default=False, help="What forget --certificate wrote."),
    ],
    model: ModelFile,
    folders: Annotated[
        list[Path] | None,
        Argument(
            metavar="[FOLDER...]",
            show_default=False,
            help="Folders of independent tasks: they are learned again, and the bits compared.",
        ),
    ] = None,
    backbone: ModelBackbone = None,
    weights: ModelWeights = None,
    device: Device = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Check that a model has forgotten what a certificate says. Without folders, this needs no backbone."""
    from protosteer.learner import Learner
    from protosteer.model import certificate as certificates
    from protosteer.model import file as model_file
    from protosteer.runtime.progress_bar import LearnProgress
    from protosteer.util.text import printable
    from protosteer.workflows.verify import relearn

    contents = certificates.read(certificate)
    held = model_file.read(model)
    found: list[tuple[bool | None, str]] = [*certificates.check(contents, model, held.memory)]
    if not contents["exact"]:
        influence = "; ".join(one["guarantee"] for one in contents["forgotten"] if not one["exact"])
        found.append((None, f"not exact: {influence}"))
    if folders:
        learner = Learner.of_model(held, backbone_of(held, backbone, weights, prepare(device, threads), precision))
        with sigterm_as_ctrl_c(), LearnProgress(make_console(stderr=True)) as progress:
            found += relearn(learner, folders, progress.on_stage)
    words = {True: "checked", False: "FAILED", None: "not checked"}
    if as_json:
        print(json.dumps({"checks": [{"passed": passed, "check": line} for passed, line in found]}, indent=1))
    else:
        print("\n".join(printable(f"{words[passed]}: {line}") for passed, line in found))
    failed = [line for passed, line in found if passed is False]
    if failed:
        raise ProtosteerError(
            f"{model} does not agree with {certificate}: {failed[0]}", code="not-verified", path=model
        )
