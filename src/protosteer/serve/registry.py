"""Serve several models by name in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from protosteer.errors import DataError, SettingsError
from protosteer.serve.limits import RequestError
from protosteer.serve.service import Service
from protosteer.util.files import real
from protosteer.util.text import check_name, listed

_NAME_LENGTH = 100


class ModelRegistry:
    """Map model names to services; the first answers requests that name no model."""

    def __init__(self, services: Sequence[Service]):
        self.services = {service.name: service for service in services}
        self.first = services[0]

    def find(self, name: str) -> Service:
        """Return the service of a model; raise `RequestError` 404 if there is none."""
        if name not in self.services:
            raise RequestError(404, f"no model is named '{name}'; there are: {listed(list(self.services), limit=50)}")
        return self.services[name]

    def start(self) -> None:
        """Start all services."""
        for service in self.services.values():
            service.start()

    def stop(self) -> None:
        """Tell all services to stop. Return at once; may be called more than once."""
        for service in self.services.values():
            service.stop()

    async def join(self) -> None:
        """Wait until all services have stopped."""
        await asyncio.gather(*(service.join() for service in self.services.values()))


def check_names(sources: Sequence[tuple[str, Path]]) -> None:
    """Check that names and files of models are unique, and that each name is usable in an address."""
    names: dict[str, Path] = {}
    files: dict[Path, str] = {}
    for name, path in sources:
        try:
            check_name(name, "the model", _NAME_LENGTH)
        except DataError as error:
            raise SettingsError(str(error), code="bad-name") from error
        if "/" in name or not name.strip("."):  # browsers and proxies resolve such path segments
            message = f"a model cannot be named '{name}': slashes, or dots alone; choose another name"
            raise SettingsError(message, code="bad-name", name=name)
        if name in names:
            message = f"two models are named '{name}', {names[name]} and {path}; give one of them another name"
            raise SettingsError(message, code="name-taken", name=name)
        if (file := real(path)) in files:
            message = f"models '{files[file]}' and '{name}' are one file, {path}; serve it once"
            raise SettingsError(message, code="name-taken", name=name)
        names[name], files[file] = path, name
