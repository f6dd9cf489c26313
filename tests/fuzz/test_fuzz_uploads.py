"""Requests with mutated paths, content types and bodies, given to the app as a server would give them."""

import functools
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

import anyio
from fastapi import FastAPI
from targets import TARGETS, Target, try_out

from serve_toys import TOKEN, encoded, pictures, service

pytestmark = pytest.mark.slow

SECONDS = 5.0  # of processor time for any input
FORM = b"multipart/form-data; boundary=b; charset=utf-8"


@functools.cache
def app() -> FastAPI:
    """One that teaches nothing, so that each request finds it as the first did."""
    return service(Path(tempfile.mkdtemp()), teach=False)


def seeds() -> Sequence[bytes]:
    """A path, a line with the content type, and a body."""
    part = b'--b\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n%s\r\n'
    picture = pictures("ant", 1)[0]
    files = [part % encoded(picture, kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")]
    forms = [b"/predict?top=2&reject=0.1\n" + FORM + b"\n" + file + b"--b--\r\n" for file in files]
    several = b"/predict\n" + FORM + b"\n" + b"".join(files) + b"--b--\r\n"
    words = b'--b\r\nContent-Disposition: form-data; name="top"\r\n\r\n3\r\n--b--\r\n'
    return [
        *forms,
        several,
        b"/predict\n" + FORM + b"\n" + words,
        b'/predict\napplication/json\n{"images": ["a.png"], "top": 3, "reject": 1e999}',
        b"/classes/red%20fox?train=true\n" + FORM + b"\n" + files[0] + b"--b--\r\n",
        b"/jobs/0123456789abcdef\ntext/plain\n",
    ]


@functools.cache
def teaching() -> FastAPI:
    """One that changes; see `check_change`."""
    return service(Path(tempfile.mkdtemp()))


def change_seeds() -> Sequence[bytes]:
    """A method and a path, a line with the content type, and a body."""
    form = seeds()[0].partition(b"\n")[2]
    posts = (b"/classes/fox", b"/classes/ant?train=true", b"/corrections?class=ant", b"/models/toy/predict?top=1")
    other = (b"GET /corrections", b"DELETE /corrections/last", b"DELETE /classes/ant", b"GET /map", b"GET /jobs/1")
    return [*(b"POST " + path + b"\n" + form for path in posts), *(line + b"\ntext/plain\n" for line in other)]


def check(data: bytes) -> None:
    for method in ("GET", "POST"):
        answered(app(), method, data)


def check_change(data: bytes) -> None:
    """With the token; whatever has changed the model, the next request finds it as the first did."""
    method, _, rest = data.partition(b" ")
    word = method.decode("latin-1")
    if not word.isascii() or not word.isalpha():  # the server rejects these before the app
        return
    if answered(teaching(), word, rest) < 400 and word != "GET":
        gone = teaching().state.service
        gone.stop()
        gone.uploads.close()
        teaching.cache_clear()
        shutil.rmtree(gone.store.path.parent, ignore_errors=True)  # a training may still write there


def answered(app: FastAPI, method: str, data: bytes) -> int:
    """Check the answer to a request, and return its status."""
    address, _, rest = data.partition(b"\n")
    kind, _, body = rest.partition(b"\n")
    path, _, query = address.partition(b"?")
    began = time.process_time()
    status, headers, answer = anyio.run(asked, app, method, path, query, kind, body)
    assert status < 500 or status == 503, (status, answer)
    if headers[b"content-type"] == b"application/json":
        json.loads(answer, parse_constant=pytest.fail)  # NaN and the like are no JSON
        assert status < 400 or json.loads(answer)["detail"].isprintable()
    else:
        assert status == 200 and headers[b"content-type"].startswith(b"text/")
    assert time.process_time() - began < SECONDS
    return status


async def asked(
    app: FastAPI, method: str, path: bytes, query: bytes, kind: bytes, body: bytes
) -> tuple[int, dict, bytes]:
    """Status, headers and body of the answer."""
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "headers": [(b"host", b"localhost"), (b"content-type", kind), (b"authorization", f"Bearer {TOKEN}".encode())],
    }
    # In two pieces, as a network might cut it; then nothing more until the client is gone.
    pieces = iter([(body[: len(body) // 2], True), (body[len(body) // 2 :], False)])
    told: list[Any] = []

    async def receive() -> dict[str, Any]:
        piece = next(pieces, None)
        if piece is None:
            await anyio.sleep_forever()
        return {"type": "http.request", "body": piece[0], "more_body": piece[1]}

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    await app(scope, receive, send)
    start, *rest = told
    return start["status"], dict(start["headers"]), b"".join(message.get("body", b"") for message in rest)


TARGETS["uploads"] = Target(seeds, check)
TARGETS["requests"] = Target(change_seeds, check_change)


@pytest.mark.parametrize("name", ["uploads", "requests"])
def test_uploads(name: str) -> None:
    try_out(name, examples=80)
