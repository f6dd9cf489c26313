"""Uploads: bounded while they arrive, checked before they are decoded, decoded as files are."""

import io
import threading
import time

import pytest
import torch

from expect import expect_error

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

import anyio
from fastapi.testclient import TestClient
from PIL import Image
from starlette.datastructures import UploadFile

from conftest import tiny_backbone
from protosteer.data.transforms import Preprocessing
from protosteer.serve.limits import Limits, RequestError
from protosteer.serve.uploads import Uploads
from serve_toys import PATIENCE, encoded, form, pictures, service

PREPROCESSING = tiny_backbone().preprocessing
SMALL = Limits(
    images=3,
    file_bytes=20_000,
    request_bytes=50_000,
    pixels=10_000,
    request_pixels=20_000,
    upload_seconds=0.3,
    uploads=2,
)


@pytest.fixture
def client(tmp_path):
    with TestClient(service(tmp_path, teach=False, limits=SMALL)) as client:
        yield client


def decoded(data: bytes, name: str = "photo.png") -> torch.Tensor:
    uploads = Uploads(PREPROCESSING, SMALL)
    (pixels,) = anyio.run(uploads.decode, [UploadFile(io.BytesIO(data), filename=name)])
    return pixels


def test_an_upload_is_decoded_as_a_file_is():
    photo = Image.effect_noise((40, 60), 80).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    buffer = io.BytesIO()
    photo.save(buffer, "JPEG", exif=exif)
    assert torch.equal(decoded(buffer.getvalue()), PREPROCESSING.to_canvas(Image.open(io.BytesIO(buffer.getvalue()))))
    assert not torch.equal(decoded(buffer.getvalue()), PREPROCESSING.to_canvas(photo))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_common_formats_are_read(kind):
    assert decoded(encoded(pictures("ant", 1)[0], kind)).shape == (3, 16, 16)


PICTURE = pictures("ant", 1)[0]


@pytest.mark.parametrize(
    "data",
    [b"", b"junk", encoded(PICTURE)[:100], encoded(PICTURE, "EPS")],
    ids=["empty", "junk", "cut", "needs another program"],
)
def test_what_is_no_image_that_may_be_opened_is_refused(data):
    with expect_error("http-422", RequestError):
        decoded(data)


@pytest.mark.parametrize("size", [(200, 51), (30_000, 30_000)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_with_too_many_pixels_is_refused_by_its_header(size, monkeypatch):
    """The data that would follow the header is not even there."""
    monkeypatch.setattr(Preprocessing, "to_canvas", lambda *_: pytest.fail("decoded"))
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, "BMP")
    data = bytearray(buffer.getvalue())
    data[18:26] = size[0].to_bytes(4, "little") + size[1].to_bytes(4, "little")
    with expect_error("http-413", RequestError):
        decoded(bytes(data))


def test_images_with_too_many_pixels_together_are_refused_before_any_is_decoded(client, monkeypatch):
    monkeypatch.setattr(Preprocessing, "to_canvas", lambda *_: pytest.fail("decoded"))
    files = [("images", (f"{i}.png", encoded(torch.zeros(3, 90, 90, dtype=torch.uint8)))) for i in range(3)]
    answer = client.post("/predict", files=files)
    assert answer.status_code == 413
    assert answer.json()["detail"] == "the images have more than 20,000 pixels together; send fewer at once"


def test_a_nasty_name_stays_on_one_line():
    with pytest.raises(RequestError) as refused:
        decoded(b"", "a\nb\x1b[31m" + "x" * 500)
    assert str(refused.value).startswith("a?b?[31mxxx") and len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (form(pictures("ant", 4)), "more than 3 images"),
        ([("images", ("big.png", bytes(20_001)))], "big.png is larger than 20,000 bytes"),
        ([("images", ("big.png", bytes(60_000)))], "the request is larger than 50,000 bytes"),
    ],
)
def test_too_much_is_refused(client, files, words):
    answer = client.post("/predict", files=files)
    assert answer.status_code == 413 and answer.json()["detail"].startswith(words)


def test_a_large_request_of_unknown_length_is_refused_while_it_arrives(client):
    received = 0

    async def receive():
        nonlocal received
        received += 10_000
        head = b'--b\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n'
        return {"type": "http.request", "body": head.ljust(10_000), "more_body": True}

    assert anyio.run(status_of, client.app, receive) == 413
    assert received == 60_000


async def status_of(app, receive) -> int:
    """The status of a request for prediction whose body comes from `receive` and has no length."""
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/predict",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=b")],
    }
    statuses = []

    async def send(message):
        statuses.append(message.get("status"))

    await app(scope, receive, send)
    return statuses[0]


def test_a_broken_form_is_refused(client):
    for kind in ("multipart/form-data; boundary=b", "multipart/form-data"):
        answer = client.post("/predict", content=b"--x\r\njunk", headers={"Content-Type": kind})
        assert answer.status_code == 422 and "form" in answer.json()["detail"]


def test_slow_uploads_end_and_do_not_keep_others_out(client):
    """Two clients that never send their images take both places, but only for a while."""
    app, statuses = client.app, []

    async def stalled() -> None:
        statuses.append(await status_of(app, anyio.sleep_forever))

    async def two() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stalled)
            tasks.start_soon(stalled)

    waiting = threading.Thread(target=anyio.run, args=(two,))
    waiting.start()
    while app.state.service.uploads._open < 2:
        time.sleep(0.001)
    answer = client.post("/predict", files=form(pictures("ant", 1)))
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    waiting.join(PATIENCE)
    assert statuses == [408, 408]
    assert client.post("/predict", files=form(pictures("ant", 1))).status_code == 200


def test_no_more_images_are_opened_once_the_pixels_of_a_request_are_too_many(monkeypatch):
    opened = []
    real_open = Image.open
    monkeypatch.setattr(Image, "open", lambda *given, **options: opened.append(1) or real_open(*given, **options))
    monkeypatch.setattr("protosteer.serve.uploads._THREADS", 1)
    uploads = Uploads(PREPROCESSING, SMALL)
    data = encoded(torch.zeros(3, 90, 90, dtype=torch.uint8))
    files = [UploadFile(io.BytesIO(data), filename=f"{number}.png") for number in range(20)]
    with pytest.raises(RequestError) as caught:
        anyio.run(uploads.decode, files)
    assert caught.value.status == 413 and len(opened) == 3  # 2 x 8,100 pixels are within 20,000
