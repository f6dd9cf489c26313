"""Image sets that others have saved: damaged Arrow files and lists of them."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from targets import TARGETS, Target, try_out

from protosteer.data.images import ForgivingFiles
from protosteer.data.sources import image_paths, read_labelled
from protosteer.errors import ProtosteerError
from set_toys import SMALL, save, save_set

pytestmark = pytest.mark.slow

ARROW = "data-00000-of-00001.arrow"


def whole_set(folder: Path) -> Path:
    image = save(folder / "a.png")
    images = [{"bytes": image.read_bytes(), "path": "a.png"}, {"bytes": None, "path": str(image)}]
    return save_set(folder / "pets", images * 3, [0, 1] * 3, ["cat", "dog"])


def seeds(name: str) -> list[bytes]:
    pytest.importorskip("pyarrow")
    with TemporaryDirectory() as folder:
        return [(whole_set(Path(folder)) / name).read_bytes()]


def check(name: str, data: bytes) -> None:
    """What is listed is read, or told to be unreadable."""
    with TemporaryDirectory() as folder:
        pets = whole_set(Path(folder))
        (pets / name).write_bytes(data)
        for read in (image_paths, lambda path: read_labelled(path).paths):
            try:
                images = ForgivingFiles(read(pets), SMALL)
                images.pixels(range(len(images)))
            except ProtosteerError as error:
                assert "\n" not in str(error)


TARGETS["arrow"] = Target(lambda: seeds(ARROW), lambda data: check(ARROW, data))
TARGETS["arrow-state"] = Target(lambda: seeds("state.json"), lambda data: check("state.json", data))


@pytest.mark.parametrize("name", ["arrow", "arrow-state"])
def test_saved_sets(name: str) -> None:
    try_out(name, examples=100)
