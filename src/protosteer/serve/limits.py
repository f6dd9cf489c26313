"""Limits of every buffer, queue and upload of the service, and the error that rejects a request."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from protosteer.errors import ProtosteerError, SettingsError
from protosteer.util.text import printable


@dataclass(frozen=True)
class Limits:
    """Bound what one request, all connections and all requests together may take."""

    # One request
    line_bytes: int = 8 * 2**10  # of the address, and of each header
    head_bytes: int = 32 * 2**10  # of everything before the body
    head_seconds: float = 10.0
    images: int = 64
    file_bytes: int = 20 * 2**20
    request_bytes: int = 64 * 2**20
    pixels: int = 50_000_000  # of one image, before resizing
    request_pixels: int = 250_000_000  # of all images of one request: twenty phone photos
    upload_seconds: float = 60.0
    answer_seconds: float = 60.0  # until a client has read its answer

    # All connections
    connections: int = 512
    connections_per_address: int = 64
    idle_seconds: float = 15.0  # between two requests

    # All requests together
    uploads: int = 256  # requests whose images are arriving
    queue: int = 1024  # images waiting for the model
    batch: int = 64  # images per forward pass
    jobs: int = 4  # training jobs waiting or running

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value <= 0:
                message = f"limit {field.name} = {value}: must be greater than 0"
                raise SettingsError(message, code="bad-setting", name=field.name)
        if self.queue < self.images:
            message = f"limit queue = {self.queue}: must hold at least the {self.images} images of one request"
            raise SettingsError(message, code="bad-setting", name="queue")


class RequestError(ProtosteerError):
    """Reject a request with an HTTP status and one line: what is wrong and what to do."""

    def __init__(self, status: int, detail: str, retry_after: int | None = None):
        super().__init__(printable(detail), code=f"http-{status}")  # detail may quote a client's text
        self.status = status
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"


def stopping_error() -> RequestError:
    """Return the error for requests that arrive while the service stops."""
    return RequestError(503, "the service is stopping; try again later", retry_after=5)
