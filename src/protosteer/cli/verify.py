"""`protosteer verify`: check a certificate of forgetting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from protosteer.cli.common import command, print_json, progress
from protosteer.cli.loading import PANEL, learner_of
from protosteer.cli.options import Json, Loading, ModelFile, path_of
from protosteer.errors import ProtosteerError
from protosteer.util.text import printable


@command(PANEL)
def verify(
    certificate: Annotated[
        Path, Argument(metavar="CERTIFICATE", parser=path_of, help="What forget --certificate wrote.")
    ],
    model: ModelFile,
    folders: Annotated[
        list[Path] | None,
        Argument(metavar="[FOLDER...]", help="Folders of independent tasks, to relearn and compare bit by bit."),
    ] = None,
    *,
    loading: Loading,
    as_json: Json = False,
) -> None:
    """Check that a model has forgotten what a certificate says. Without folders, this needs no backbone."""
    from protosteer.model import certificate as certificates
    from protosteer.model import file as model_file
    from protosteer.workflows.verify import relearn

    contents = certificates.read(certificate)
    learned_model = model_file.read(model)
    checks: list[tuple[bool | None, str]] = [*certificates.check(contents, model, learned_model.memory)]
    if not contents["exact"]:
        influence = "; ".join(part["guarantee"] for part in contents["forgotten"] if not part["exact"])
        checks.append((None, f"not exact: {influence}"))
    if folders:
        with progress() as on_stage:
            checks += relearn(learner_of(learned_model, loading), folders, on_stage)
    words = {True: "checked", False: "FAILED", None: "not checked"}
    if as_json:
        print_json({"checks": [{"passed": passed, "check": line} for passed, line in checks]})
    else:
        print("\n".join(printable(f"{words[passed]}: {line}") for passed, line in checks))
    failures = [line for passed, line in checks if passed is False]
    if failures:
        message = f"{model} does not agree with {certificate}: {failures[0]}"
        raise ProtosteerError(message, code="not-verified", path=model)
