"""Several models in one process, each with a service of its own, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from protosteer.errors import DataError, SettingsError
from protosteer.serve.limits import Refused
from protosteer.serve.service import Service
from protosteer.util.files import real
from protosteer.util.text import check_name, listed

_NAME_LENGTH = 100


class Models:
    """Services by the names of their models. The first answers where a request names none."""

    def __init__(self, services: Sequence[Service]):
        self.services = {service.name: service for service in services}
        self.first = services[0]

    def find(self, name: str) -> Service:
        if name not in self.services:
            raise Refused(
                404, f"no model is named '{name}'; there are: {listed(list(self.services), most=50)}"
            )
        return self.services[name]

    def start(self) -> None:
        for service in self.services.values():
            service.start()

    def stop(self) -> None:
        """All at once, none after another. Returns at once; may be called more than once."""
        for service in self.services.values():
            service.stop()

    async def join(self) -> None:
        await asyncio.gather(*(service.join() for service in self.services.values()))


def check_names(places: Sequence[tuple[str, Path]]) -> None:
    """Names and files of models that are to be served together: each once, each name fit for an address."""
    names: dict[str, Path] = {}
    files: dict[Path, str] = {}
    for name, path in places:
        try:
            check_name(name, "the model", _NAME_LENGTH)
        except DataError as error:
            raise SettingsError(str(error), code="bad-name") from error
        if "/" in name or not name.strip("."):  # browsers and proxies resolve such a part of an address
            raise SettingsError(
                f"a model cannot be named '{name}': slashes, or dots alone; choose another name",
                code="bad-name",
                name=name,
            )
        if name in names:
            raise SettingsError(
                f"two models are named '{name}', {names[name]} and {path}; give one of them another name",
                code="name-taken",
                name=name,
            )
        if (file := real(path)) in files:
            raise SettingsError(
                f"models '{files[file]}' and '{name}' are one file, {path}; serve it once",
                code="name-taken",
                name=name,
            )
        names[name], files[file] = path, name
