"""Receive uploaded images within limits, and decode them to pixels of one size.

Nothing is trusted: bytes are counted while they arrive, the number of pixels is read from an image's header
before memory is allocated, and only formats are opened whose decoders start no other program.
"""

from __future__ import annotations

import asyncio
import io
import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from PIL import Image
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive
from torch import Tensor

from protosteer.data.decode_budget import formats
from protosteer.data.transforms import Preprocessing
from protosteer.serve.limits import Limits, RequestError
from protosteer.util.text import printable

_In = TypeVar("_In")
_Out = TypeVar("_Out")

FIELD = "images"
_THREADS = min(8, os.cpu_count() or 1)
_MAX_FIELDS = 8  # parts of a form that are not files; they are ignored


class Uploads:
    """Receive the images of requests, and decode them in a thread pool."""

    def __init__(self, preprocessing: Preprocessing, limits: Limits):
        self._preprocessing = preprocessing
        self._limits = limits
        self._open = 0  # requests whose images are arriving or in use
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="decode")

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[list[UploadFile]]:
        """Yield the named files in field `images` of a multipart form; close them at the end."""
        if self._open >= self._limits.uploads:
            raise RequestError(503, f"{self._open} uploads are under way; try again later", retry_after=1)
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
        """Decode files to uint8 [3, h, w], all of one size; raise `RequestError` for the first bad image."""
        total = _PixelTotal(self._limits.request_pixels)
        images = await self._in_threads(partial(self.read_header, total=total), files)
        return await self._in_threads(self.canvas, images)

    async def _in_threads(self, work: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
        """Apply `work` to each item in threads; all end before the first error is raised."""
        loop = asyncio.get_running_loop()
        step = math.ceil(len(items) / _THREADS)
        chunks = [items[i : i + step] for i in range(0, len(items), step)]
        tasks = [loop.run_in_executor(self._pool, _apply, work, chunk) for chunk in chunks]
        await asyncio.gather(*tasks, return_exceptions=True)
        return [result for task in tasks for result in task.result()]

    def close(self) -> None:
        """Release the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _form(self, request: Request) -> FormData:
        limits = self._limits
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise RequestError(422, f"the request has no images; send them as multipart/form-data, field '{FIELD}'")
        length = request.headers.get("content-length", "")
        _check_bytes(int(length) if length.isdecimal() else 0, limits.request_bytes)
        limited_request = Request(request.scope, _count_bytes(request.receive, limits.request_bytes))
        try:
            return await asyncio.wait_for(
                limited_request.form(max_files=limits.images, max_fields=_MAX_FIELDS), limits.upload_seconds
            )
        except asyncio.TimeoutError:
            raise RequestError(
                408, f"the images took longer than {limits.upload_seconds:g} s to arrive; send fewer at once"
            ) from None
        except HTTPException as error:  # a form that starlette rejects
            if error.detail.startswith("Too many files"):
                raise RequestError(413, f"more than {limits.images} images; send fewer at once") from None
            raise RequestError(422, f"the form cannot be read ({error.detail}); send multipart/form-data") from None
        except (ValueError, LookupError):  # a charset that decodes nothing, such as `undefined`
            raise RequestError(422, "the form's names cannot be decoded; send multipart/form-data in UTF-8") from None
        except OSError as error:  # large files lie in the temporary folder
            raise RequestError(
                507, f"there is no room for the images ({error.strerror or error}); try again later", retry_after=60
            ) from None

    def _files(self, form: FormData) -> list[UploadFile]:
        files = []
        for number, part in enumerate(form.getlist(FIELD), 1):
            if isinstance(part, str):
                raise RequestError(
                    422, f"part {number} of field '{FIELD}' is text, not a file; send it with a file name"
                )
            part.filename = part.filename or f"image {number}"
            if (part.size or 0) > self._limits.file_bytes:
                name, limit = shorten_name(part.filename), self._limits.file_bytes
                raise RequestError(413, f"{name} is larger than {limit:,} bytes; make it smaller")
            files.append(part)
        if not files:
            raise RequestError(422, f"the form has no file in field '{FIELD}'; add at least one image")
        return files

    def read_header(self, file: UploadFile, total: _PixelTotal) -> OpenImage:
        """Read an image's header; raise `RequestError` if it is no image, or too large alone or in total."""
        total.add(0)  # fails once other images exceeded the limit: the rest is not opened
        name, limit = shorten_name(file.filename or ""), self._limits.pixels
        with _explain_errors(name, limit):
            image = Image.open(io.BytesIO(file.file.read()), formats=formats())
            if image.width * image.height > limit:
                raise Image.DecompressionBombError
        total.add(image.width * image.height)
        return OpenImage(name, image)

    def canvas(self, source: OpenImage) -> Tensor:
        """Decode an opened image to uint8 [3, h, w]."""
        with _explain_errors(source.name, self._limits.pixels), closing(source.image) as image:
            return self._preprocessing.to_canvas(image)


@dataclass(frozen=True)
class OpenImage:
    """An image whose header alone was read."""

    name: str
    image: Image.Image


class _PixelTotal:
    """Count the pixels of one request's images while threads open them."""

    def __init__(self, limit: int):
        self._limit = limit
        self._count = 0
        self._lock = threading.Lock()

    def add(self, pixels: int) -> None:
        with self._lock:
            self._count += pixels
            is_exceeded = self._count > self._limit
        if is_exceeded:
            raise RequestError(413, f"the images have more than {self._limit:,} pixels together; send fewer at once")


@contextmanager
def _explain_errors(name: str, limit: int) -> Iterator[None]:
    try:
        yield
    except Image.DecompressionBombError:
        raise RequestError(413, f"{name} has more than {limit:,} pixels; make it smaller") from None
    except Exception:  # a damaged file makes decoders raise nearly anything
        heic = (
            " (for HEIC, install protosteer[heic] where the service runs, or save a JPEG copy)"
            if name.lower().endswith((".heic", ".heif", ".hif"))
            else ""
        )
        message = f"{name} cannot be read as an image; send a JPEG, PNG, WebP, AVIF, GIF, BMP or TIFF file{heic}"
        raise RequestError(422, message) from None


def _apply(work: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
    return [work(item) for item in items]


def _count_bytes(receive: Receive, limit: int) -> Receive:
    """Count the bytes that arrive: the announced length may be wrong or absent."""
    total = 0

    async def receive_counted() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        _check_bytes(total, limit)
        return message

    return receive_counted


def _check_bytes(count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(413, f"the request is larger than {limit:,} bytes; send fewer images at once")


def shorten_name(name: str) -> str:
    """Return a file's name in one printable line of at most 100 characters."""
    text = printable(name)
    return text if len(text) <= 100 else f"{text[:97]}..."
