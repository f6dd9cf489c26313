"""`protosteer push` and `protosteer pull`: models on the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from protosteer.cli.common import command, print_json, say
from protosteer.cli.loading import PANEL, refuse_existing, write_new
from protosteer.cli.options import Json, ModelFile, path_of
from protosteer.util.text import counted

Repository = Annotated[str, Argument(metavar="USER/NAME", help="Repository on the Hugging Face Hub.")]


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

    contents = model_file.read(model)
    reader = reader_of(contents.memory, contents.settings)
    if dry_run:
        print(sharing.model_card(contents, reader, repo, licence), end="")
        return
    url = sharing.push(contents, reader, repo, private=private or None, licence=licence)
    print(json.dumps({"url": url}) if as_json else url)


@command(PANEL)
def pull(
    repo: Repository,
    model: Annotated[
        Path | None, Argument(metavar="[MODEL]", parser=path_of, help="File to write (default: NAME.protosteer).")
    ] = None,
    revision: Annotated[str | None, Option(help="Branch, tag or commit.")] = None,
    as_json: Json = False,
) -> None:
    """Download a model from the Hugging Face Hub, and check it as a file from an untrusted source."""
    from protosteer import sharing

    out = model or Path(f"{repo.rpartition('/')[2]}.protosteer")
    refuse_existing(out)
    contents = sharing.pull(repo, revision)
    write_new(out, contents, "pull")
    if as_json:
        print_json({"path": str(out), "classes": contents.memory.classes})
    else:
        print(f"{out}: {counted(len(contents.memory.classes), 'class')}, backbone {contents.backbone['name']}")
        say(f"next: protosteer predict {out} IMAGE")
