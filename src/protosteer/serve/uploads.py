"""Images as they come in: received within limits, then decoded to pixels of one size.

Nothing is trusted: bytes are counted while they arrive, the number of pixels is read from an image's header
before any memory is taken for them, and only formats are opened that need no other program.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import BinaryIO

from PIL import Image
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive
from torch import Tensor

from protosteer.data.transforms import Preprocessing
from protosteer.serve.limits import Limits, Refused
from protosteer.util.text import printable

FIELD = "images"
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA")
_FIELDS = 8  # parts of a form that are not files; none is looked at


@dataclass(frozen=True)
class Upload:
    """An image file that was sent; `file` is in memory, or on disk if it is large."""

    name: str
    bytes: int
    file: BinaryIO


async def receive(request: Request, limits: Limits) -> list[Upload]:
    """The files in the field `images` of a multipart form. The caller closes them."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise Refused(422, f"the request has no images; send them as multipart/form-data, field '{FIELD}'")
    if _declared_bytes(request) > limits.request_bytes:
        raise _too_large(limits)
    bounded = Request(request.scope, _bounded(request.receive, limits))
    try:
        form = await asyncio.wait_for(
            bounded.form(max_files=limits.images, max_fields=_FIELDS), limits.upload_seconds
        )
    except asyncio.TimeoutError:
        raise Refused(
            408, f"the images took longer than {limits.upload_seconds:g} s to arrive; send fewer at once"
        ) from None
    except HTTPException as error:  # starlette's word for a form that it does not take
        if error.detail.startswith("Too many files"):
            raise Refused(413, f"more than {limits.images} images; send fewer at once") from None
        raise Refused(422, f"the form cannot be read ({error.detail}); send multipart/form-data") from None
    try:
        return _uploads([part for key, part in form.multi_items() if key == FIELD], limits)
    except Refused:
        await form.close()
        raise


def _declared_bytes(request: Request) -> int:
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


def _bounded(receive: Receive, limits: Limits) -> Receive:
    """Counts what arrives, since a length that is announced need not be true, nor be announced at all."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limits.request_bytes:
            raise _too_large(limits)
        return message

    return counted


def _too_large(limits: Limits) -> Refused:
    return Refused(
        413, f"the request is larger than {limits.request_bytes:,} bytes; send fewer images at once"
    )


def _uploads(parts: Sequence[UploadFile | str], limits: Limits) -> list[Upload]:
    uploads = []
    for number, part in enumerate(parts, 1):
        if isinstance(part, str):
            raise Refused(
                422, f"part {number} of field '{FIELD}' is text, not a file; send it with a file name"
            )
        name = part.filename or f"image {number}"
        size = part.size or 0
        if size > limits.file_bytes:
            raise Refused(413, f"{_shown(name)} is larger than {limits.file_bytes:,} bytes; make it smaller")
        uploads.append(Upload(name, size, part.file))
    if not uploads:
        raise Refused(422, f"the form has no file in field '{FIELD}'; add at least one image")
    return uploads


async def decode(
    uploads: Sequence[Upload], preprocessing: Preprocessing, limits: Limits, pool: Executor, threads: int
) -> list[Tensor]:
    """uint8 [3, h, w] of each image, all of one size; the first bad image is named."""
    loop = asyncio.get_running_loop()
    count = min(threads, len(uploads))
    shares = [uploads[first::count] for first in range(count)]
    decoded = await asyncio.gather(
        *(loop.run_in_executor(pool, _decode, share, preprocessing, limits) for share in shares)
    )
    canvases = []
    for i in range(len(uploads)):
        outcome = decoded[i % count][i // count]
        if isinstance(outcome, Refused):
            raise outcome
        canvases.append(outcome)
    return canvases


def _decode(
    uploads: Iterable[Upload], preprocessing: Preprocessing, limits: Limits
) -> list[Tensor | Refused]:
    outcomes: list[Tensor | Refused] = []
    for upload in uploads:
        try:
            outcomes.append(canvas(upload, preprocessing, limits))
        except Refused as refused:
            outcomes.append(refused)
    return outcomes


def canvas(upload: Upload, preprocessing: Preprocessing, limits: Limits) -> Tensor:
    name = _shown(upload.name)
    try:
        with Image.open(io.BytesIO(upload.file.read()), formats=_known_formats()) as image:
            if image.width * image.height > limits.pixels:
                raise Refused(
                    413,
                    f"{name} has {image.width} x {image.height} pixels, more than {limits.pixels:,}; "
                    "make it smaller",
                )
            return preprocessing.to_canvas(image)
    except Refused:
        raise
    except Image.DecompressionBombError:
        raise Refused(413, f"{name} has more than {limits.pixels:,} pixels; make it smaller") from None
    except Exception:  # a damaged file makes decoders raise nearly anything
        raise Refused(
            422, f"{name} cannot be read as an image; send a JPEG, PNG, WebP, GIF, BMP or TIFF file"
        ) from None


def _known_formats() -> list[str]:
    """Those of ours that this build of Pillow has; finding its plugins takes a moment, once."""
    if "TGA" not in Image.OPEN:
        Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def _shown(name: str) -> str:
    """A file's name as it may stand in a line of text."""
    shown = printable(name)
    return shown if len(shown) <= 100 else f"{shown[:97]}..."
