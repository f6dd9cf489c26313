"""Decoding within bounds gives the pixels that decoding without them gave."""

import io
import struct
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from PIL import Image, ImageOps

from expect import expect_error
from protosteer.data import transforms
from protosteer.data.decode_budget import DECODING, Budget, decoded_bytes, formats
from protosteer.data.image_files import opened
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError

HALF = (0.5, 0.5, 0.5)
MODES = ["1", "L", "P", "PA", "LA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16", "I;16B", "F"]


def plain_canvas(image: Image.Image, how: Preprocessing) -> np.ndarray:
    """What `to_canvas` is to give, all at once and with copies of everything."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if image.mode != "I" or values.max() > 255:
            values = (values + 128) // 257
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        values = np.nan_to_num(np.asarray(image, dtype=np.float32))
        scale = 255 if values.max() <= 1 else 1
        image = Image.fromarray((values * scale).round().clip(0, 255).astype(np.uint8))
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    image = image.convert("RGB")
    longest = 16 * min(image.size)
    width, height = (min(side, longest) for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    image = image.crop((left, top, left + width, top + height))
    side = how.canvas
    short = min(image.size)
    resized = image.resize(
        (side * image.width // short, side * image.height // short), Image.Resampling[how.interpolation.upper()]
    )
    array = np.asarray(resized)
    top, left = (array.shape[0] - side) // 2, (array.shape[1] - side) // 2
    return array[top : top + side, left : left + side].transpose(2, 0, 1)


def noise(mode: str, size: tuple[int, int], seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    height, width = size[1], size[0]
    if mode == "I":
        most = (256, 65536, 2**31 - 1)[seed % 3]
        return Image.fromarray(rng.integers(-most // 4, most, (height, width)).astype(np.int32))
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 65536, (height, width)).astype(np.uint16))
    if mode == "I;16B":
        data = rng.integers(0, 65536, (height, width)).astype(">u2").tobytes()
        return Image.frombytes("I;16B", size, data)
    if mode == "F":
        values = rng.normal(0, (1, 100)[seed % 2], (height, width)).astype(np.float32)
        values[0, 0] = np.nan
        return Image.fromarray(np.minimum(values, 1) if seed % 4 == 0 else values)
    colour = Image.fromarray(rng.integers(0, 256, (height, width, 4), dtype=np.uint8))
    if mode in ("1", "P", "PA"):
        return colour.convert("RGB").convert("P").convert(mode)
    if mode in ("RGBA", "LA"):
        return colour.convert(mode)
    bands = len(Image.new(mode, (1, 1)).getbands())
    return Image.frombytes(mode, size, rng.integers(0, 256, height * width * bands, dtype=np.uint8).tobytes())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_the_same_pixels_as_at_once(mode: str, interpolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "_STRIP", 300)  # so that small images have many strips
    how = Preprocessing(20, HALF, HALF, 0.9, interpolation)
    for seed, size in enumerate([(50, 61), (64, 33), (7, 300), (400, 9), (22, 22), (5, 4), (1, 1)]):
        image = noise(mode, size, seed)
        before = image.copy()
        assert np.array_equal(how.to_canvas(image).numpy(), plain_canvas(image, how)), size
        assert image == before  # it may be somebody's own


@pytest.mark.parametrize("orientation", [0, 1, 3, 6, 8, 9])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_turned_files(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = io.BytesIO()
    noise("RGB", (90, 60), 0).save(data, kind, exif=exif)
    how = Preprocessing(20, HALF, HALF)
    ours = how.to_canvas(Image.open(io.BytesIO(data.getvalue()))).numpy()
    assert np.array_equal(ours, plain_canvas(Image.open(io.BytesIO(data.getvalue())), how))


def test_palettes_with_transparency() -> None:
    image = noise("P", (40, 40), 1)
    image.info["transparency"] = bytes(range(256))
    how = Preprocessing(20, HALF, HALF)
    assert np.array_equal(how.to_canvas(image).numpy(), plain_canvas(image, how))


def test_sixteen_bits_take_no_more_than_strips() -> None:
    image = Image.fromarray(np.zeros((3000, 3000), np.uint16))
    tracemalloc.start()
    Preprocessing(20, HALF, HALF).to_canvas(image)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 * 2**20  # 72 MB were one array of int64


def test_all_at_once_take_no_more_than_the_budget() -> None:
    budget, inside, most, barrier = Budget(100), [0], [0], threading.Lock()

    def decode() -> None:
        with budget.reserve(40):
            with barrier:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            threading.Event().wait(0.01)
            with barrier:
                inside[0] -= 1

    threads = [threading.Thread(target=decode) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 2
    with expect_error("image-too-large", DataError), budget.reserve(101):
        pass
    with pytest.raises(KeyError), budget.reserve(100):
        raise KeyError
    with budget.reserve(100):  # what failed has given back its share
        pass


def test_an_image_beyond_the_budget_is_refused_before_it_is_decoded(tmp_path, monkeypatch) -> None:
    Image.new("RGBA", (400, 300)).save(tmp_path / "x.png")
    monkeypatch.setattr(DECODING, "limit", 400 * 300 * 8 - 1)
    with expect_error("unreadable-image", DataError), opened(tmp_path / "x.png") as image:
        assert decoded_bytes(image) == 400 * 300 * 8
        Preprocessing(20, HALF, HALF).to_canvas(image)
    monkeypatch.setattr(DECODING, "limit", 400 * 300 * 8)
    with opened(tmp_path / "x.png") as image:
        Preprocessing(20, HALF, HALF).to_canvas(image)


# Opens a file and prints by how many MB the peak of resident memory grew.
OPEN_BOMB = """
import io, resource, sys
from PIL import Image
from protosteer.data.decode_budget import formats
allowed, data = formats(), open(sys.argv[1], "rb").read()
def peak():  # in MB; getrusage would report that of the process that started this one
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024
Image.MAX_IMAGE_PIXELS = None
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30,) * 2)
before = peak()
try:
    images = [Image.open(io.BytesIO(data), formats=allowed) for _ in range(3)]
except Image.UnidentifiedImageError:
    images = []
print(peak() - before)
"""


def bomb(kind: str, side: int) -> bytes:
    """Return a file of side x side pixels; of an ICO file, the directory says 32 x 32."""
    file = io.BytesIO()
    if kind == "ICO":
        png = bomb("PNG", side)
        entry = struct.pack("<BBBBHHII", 32, 32, 0, 0, 1, 32, len(png), 22)
        return struct.pack("<HHH", 0, 1, 1) + entry + png
    options = {"lossless": True, "method": 0} if kind == "WEBP" else {"speed": 10} if kind == "AVIF" else {}
    if kind == "TIFF":
        options = {"compression": "tiff_deflate"}
    Image.new("P" if kind == "GIF" else "RGB", (side, side)).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory as Linux reports it")
@pytest.mark.parametrize("kind", ["ICO", *(kind for kind in formats() if kind != "HEIF")])
def test_opening_decodes_no_pixels(kind: str, tmp_path) -> None:
    path, side = tmp_path / "image", 3000
    path.write_bytes(bomb(kind, side))
    words = [sys.executable, "-c", OPEN_BOMB, str(path)]
    grown = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert grown * 2**20 < 3 * path.stat().st_size + side * side // 2  # 27 MB and more were decoded images
