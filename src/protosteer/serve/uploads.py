"""Images as they come in: received within limits, then decoded to pixels of one size.

Nothing is trusted: bytes are counted while they arrive, the number of pixels is read from an image's header
before any memory is taken for them, and only formats are opened that need no other program.
"""

from __future__ import annotations

import asyncio
import io
import math
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from PIL import Image
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive
from torch import Tensor

from protosteer.data.decode_budget import formats
from protosteer.data.transforms import Preprocessing
from protosteer.serve.limits import Limits, Refused
from protosteer.util.text import printable

_In = TypeVar("_In")
_Out = TypeVar("_Out")

FIELD = "images"
_THREADS = min(8, os.cpu_count() or 1)  # that decode
_FIELDS = 8  # parts of a form that are not files; none is looked at


class Uploads:
    """Receives the images of requests, and decodes them in threads of its own."""

    def __init__(self, preprocessing: Preprocessing, limits: Limits):
        self._preprocessing = preprocessing
        self._limits = limits
        self._open = 0  # requests whose images are here or on their way
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="decode")

    @asynccontextmanager
    async def received(self, request: Request) -> AsyncIterator[list[UploadFile]]:
        """The files in the field `images` of a multipart form, each with a name; closed at the end."""
        if self._open >= self._limits.uploads:
            raise Refused(503, f"{self._open} uploads are under way; try again later", retry_after=1)
        self._open += 1
        try:
            form = await self._form(request)
            try:
                yield self._files(form)
            finally:
                await form.close()
        finally:
            self._open -= 1

    async def decode(self, files: Sequence[UploadFile]) -> list[Tensor]:
        """uint8 [3, h, w] of each image, all of one size; the first bad image is named."""
        images = await self._shared_out(self.opened, files)
        most = self._limits.request_pixels
        if sum(image.pixels for image in images) > most:
            raise Refused(413, f"the images have more than {most:,} pixels together; send fewer at once")
        return await self._shared_out(self.canvas, images)

    async def _shared_out(self, work: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
        """What `work` makes of each item, in threads; all have ended before the first error is raised."""
        loop = asyncio.get_running_loop()
        step = math.ceil(len(items) / _THREADS)
        shares = [items[i : i + step] for i in range(0, len(items), step)]
        tasks = [loop.run_in_executor(self._pool, _each, work, share) for share in shares]
        await asyncio.gather(*tasks, return_exceptions=True)
        return [made for task in tasks for made in task.result()]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _form(self, request: Request) -> FormData:
        limits = self._limits
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise Refused(
                422, f"the request has no images; send them as multipart/form-data, field '{FIELD}'"
            )
        announced = request.headers.get("content-length", "")
        _check_bytes(int(announced) if announced.isdecimal() else 0, limits.request_bytes)
        bounded = Request(request.scope, _counted(request.receive, limits.request_bytes))
        try:
            return await asyncio.wait_for(
                bounded.form(max_files=limits.images, max_fields=_FIELDS), limits.upload_seconds
            )
        except asyncio.TimeoutError:
            raise Refused(
                408, f"the images took longer than {limits.upload_seconds:g} s to arrive; send fewer at once"
            ) from None
        except HTTPException as error:  # starlette's word for a form that it does not take
            if error.detail.startswith("Too many files"):
                raise Refused(413, f"more than {limits.images} images; send fewer at once") from None
            raise Refused(
                422, f"the form cannot be read ({error.detail}); send multipart/form-data"
            ) from None

    def _files(self, form: FormData) -> list[UploadFile]:
        files = []
        for number, part in enumerate(form.getlist(FIELD), 1):
            if isinstance(part, str):
                raise Refused(
                    422, f"part {number} of field '{FIELD}' is text, not a file; send it with a file name"
                )
            part.filename = part.filename or f"image {number}"
            if (part.size or 0) > self._limits.file_bytes:
                name, most = shown(part.filename), self._limits.file_bytes
                raise Refused(413, f"{name} is larger than {most:,} bytes; make it smaller")
            files.append(part)
        if not files:
            raise Refused(422, f"the form has no file in field '{FIELD}'; add at least one image")
        return files

    def opened(self, file: UploadFile) -> Opened:
        name, most = shown(file.filename or ""), self._limits.pixels
        with _reading(name, most):
            image = Image.open(io.BytesIO(file.file.read()), formats=formats())
            if image.width * image.height > most:
                raise Image.DecompressionBombError
        return Opened(name, image)

    def canvas(self, opened: Opened) -> Tensor:
        with _reading(opened.name, self._limits.pixels), closing(opened.image) as image:
            return self._preprocessing.to_canvas(image)


@dataclass(frozen=True)
class Opened:
    """An image of which nothing is known but its header."""

    name: str
    image: Image.Image

    @property
    def pixels(self) -> int:
        return self.image.width * self.image.height


@contextmanager
def _reading(name: str, most: int) -> Iterator[None]:
    try:
        yield
    except Image.DecompressionBombError:
        raise Refused(413, f"{name} has more than {most:,} pixels; make it smaller") from None
    except Exception:  # a damaged file makes decoders raise nearly anything
        raise Refused(
            422, f"{name} cannot be read as an image; send a JPEG, PNG, WebP, GIF, BMP or TIFF file"
        ) from None


def _each(work: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
    return [work(item) for item in items]


def _counted(receive: Receive, most: int) -> Receive:
    """Counts what arrives, since a length that is announced need not be true, nor be announced at all."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        _check_bytes(seen, most)
        return message

    return counted


def _check_bytes(count: int, most: int) -> None:
    if count > most:
        raise Refused(413, f"the request is larger than {most:,} bytes; send fewer images at once")


def shown(name: str) -> str:
    """A file's name as it may stand in a line of text."""
    shown = printable(name)
    return shown if len(shown) <= 100 else f"{shown[:97]}..."
