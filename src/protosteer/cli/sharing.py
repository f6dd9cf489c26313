"""`protosteer push` and `protosteer pull`: models on the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from protosteer.cli.common import command, say
from protosteer.cli.loading import PANEL, refuse_existing
from protosteer.cli.options import Json, ModelFile, path_of

Repository = Annotated[
    str, Argument(metavar="USER/NAME", help="Repository on the Hugging Face Hub.", show_default=False)
]


@command(PANEL)
def push(
    model: ModelFile,
    repo: Repository,
    private: Annotated[bool, Option("--private", help="If the repository is new: only you can see it.")] = False,
    licence: Annotated[
        str | None, Option("--license", metavar="ID", help="Licence of your model for the card, such as apache-2.0.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the model card; upload nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Upload a model with a model card to the Hugging Face Hub. Needs no backbone; log in with hf auth login."""
    from protosteer import sharing
    from protosteer.model import file as model_file
    from protosteer.rules import reader_of

    read = model_file.read(model)
    reader = reader_of(read.memory, read.settings)
    if dry_run:
        print(sharing.model_card(read, reader, repo, licence), end="")
        return
    url = sharing.push(read, reader, repo, private=private or None, licence=licence)
    print(json.dumps({"url": url}) if as_json else url)


@command(PANEL)
def pull(
    repo: Repository,
    model: Annotated[
        Path | None,
        Argument(
            metavar="[MODEL]", parser=path_of, help="File to write (default: NAME.protosteer).", show_default=False
        ),
    ] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Download a model from the Hugging Face Hub, and check it as a file from an untrusted source."""
    from protosteer import sharing
    from protosteer.model.transaction import transaction
    from protosteer.util.files import writing
    from protosteer.util.text import counted

    out = model or Path(f"{repo.rpartition('/')[2]}.protosteer")
    refuse_existing(out)
    pulled = sharing.pull(repo, revision)
    with writing(out, None), transaction(out, "pull") as change:
        refuse_existing(out)  # again: others may have written it meanwhile
        change.put(pulled)
    if as_json:
        print(json.dumps({"path": str(out), "classes": pulled.memory.classes}, indent=1))
    else:
        print(f"{out}: {counted(len(pulled.memory.classes), 'class')}, backbone {pulled.backbone['name']}")
        say(f"next: protosteer predict {out} IMAGE")
