"""How much a service takes on: every buffer, queue and upload has a limit; a request beyond it is refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from protosteer.errors import ProtosteerError, SettingsError
from protosteer.util.text import printable


@dataclass(frozen=True)
class Limits:
    # One request
    line_bytes: int = 8 * 2**10  # of its address, and of each header
    head_bytes: int = 32 * 2**10  # of all that is not its body
    head_seconds: float = 10.0
    images: int = 64
    file_bytes: int = 20 * 2**20
    request_bytes: int = 64 * 2**20
    pixels: int = 50_000_000  # of one image, before it is resized
    request_pixels: int = 250_000_000  # of all images of one request: twenty of a telephone's
    upload_seconds: float = 60.0
    answer_seconds: float = 60.0  # until a client has read what it is sent

    # All connections
    connections: int = 512
    connections_per_address: int = 64
    idle_seconds: float = 15.0  # between two requests

    # All requests together
    uploads: int = 256  # requests that are sending their images
    queue: int = 1024  # images that wait for the model
    batch: int = 64  # images that the model is given at once
    jobs: int = 4  # trainings that wait or run

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value <= 0:
                raise SettingsError(
                    f"limit {field.name} = {value}: must be greater than 0",
                    code="bad-setting",
                    name=field.name,
                )
        if self.queue < self.images:
            raise SettingsError(
                f"limit queue = {self.queue}: must hold at least the {self.images} images of one request",
                code="bad-setting",
                name="queue",
            )


class Refused(ProtosteerError):
    """A request that is not carried out: its HTTP status, and one line that says why and what to do."""

    def __init__(self, status: int, detail: str, retry_after: int | None = None):
        super().__init__(printable(detail))  # names that others chose stand in it
        self.status = status
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"


def stopping() -> Refused:
    return Refused(503, "the service is stopping; try again later", retry_after=5)
