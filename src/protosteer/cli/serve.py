"""`protosteer serve`: models over HTTP."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from protosteer.cli.common import CommandLineError, command, say
from protosteer.cli.loading import PANEL, open_learners, say_notes
from protosteer.cli.options import Loading, check_reject, path_of

if TYPE_CHECKING:
    from protosteer.learner import Learner


@command(PANEL)
def serve(
    models: Annotated[
        list[str],
        Argument(metavar="[NAME=]MODEL", help="Model files, each with the name to serve it by (default: the file's)."),
    ],
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 is every address.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    host_name: Annotated[
        list[str] | None, Option(help="Extra host name to accept in the Host header (repeatable).")
    ] = None,
    reject: Annotated[
        float, Option(callback=check_reject, help="Share of known images that may be rejected as unknown by mistake.")
    ] = 0.05,
    allow_teach: Annotated[
        bool, Option("--allow-teach", help="Allow clients with the token to add and forget classes.")
    ] = False,
    token: Annotated[
        str | None, Option(help="Bearer token for changes (default: PROTOSTEER_TOKEN, or a new one, which is printed).")
    ] = None,
    thumbnails: Annotated[
        bool, Option("--thumbnails", help="Show thumbnails kept by learn --thumbnails to every client.")
    ] = False,
    access_log: Annotated[bool, Option("--access-log", help="Print a line for every request.")] = False,
    *,
    loading: Loading,
) -> None:
    """Serve models over HTTP, with a web UI to try them. Stop with Ctrl-C."""
    from protosteer.serve.app import create_app, run
    from protosteer.serve.registry import check_names

    if token is not None and not allow_teach:
        raise CommandLineError("--token needs --allow-teach", code="conflicting-options")
    places = [_parse_place(word) for word in models]
    check_names(places)  # before anything is loaded
    learners = open_learners([path for _, path in places], loading)
    token = token or (os.environ.get("PROTOSTEER_TOKEN") if allow_teach else None)
    new_token = secrets.token_urlsafe(18) if allow_teach and token is None else None
    (name, model_path), *other_places = places
    application = create_app(
        learners[0],
        model_path,
        name=name,
        others={key: (learner, path) for (key, path), learner in zip(other_places, learners[1:], strict=True)},
        allow_teach=allow_teach,
        token=token or new_token,
        reject=reject,
        thumbnails=thumbnails,
        host_names=[host, *(host_name or [])],
    )

    def show_address(address: str) -> None:
        _tell(places, learners, address)
        if new_token:
            say(f"token for teaching: {new_token}")

    run(application, host, port, access_log=access_log, on_ready=show_address)
    say("stopped")


def _parse_place(word: str) -> tuple[str, Path]:
    """Split NAME=MODEL into a name and a file. A file may have = in its name, too."""
    name, equals, path = word.partition("=")
    if equals and not os.path.lexists(word):
        return name, path_of(path)
    return Path(word).stem, path_of(word)


def _tell(places: Sequence[tuple[str, Path]], learners: Sequence[Learner], address: str) -> None:
    if len(places) == 1:
        say(f"serving {places[0][1]}, {len(learners[0].classes)} classes, at {address} (Ctrl-C stops)")
    else:
        say(f"serving {len(places)} models at {address} (Ctrl-C stops)")
    for (name, path), learner in zip(places, learners, strict=True):
        if len(places) > 1:
            say(f"{name}: {path}, {len(learner.classes)} classes")
        say_notes(learner)
