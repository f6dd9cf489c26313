"""Image sets that Hugging Face's `datasets` has saved: their images are paths like others."""

import json
from pathlib import Path

import pytest
import torch

from expect import expect_error
from protosteer.data.hf_arrow import is_set
from protosteer.data.image_files import image_bytes, image_exists, image_version
from protosteer.data.images import FileImages
from protosteer.data.sources import image_paths, read_labelled
from protosteer.errors import DataError, SettingsError
from set_toys import SMALL, save, save_set

pytest.importorskip("pyarrow", reason="image sets in Arrow files need pyarrow")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [save(tmp_path / "photos" / f"{i}.png", i) for i in range(7)]


@pytest.fixture
def pets(tmp_path: Path, files: list[Path]) -> Path:
    """Two files; one image lies outside of them."""
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in files]
    images[5] = {"bytes": None, "path": str(files[5])}
    return save_set(tmp_path / "pets", images, [0, 1, 0, 1, 1, 1, 0], ["dog", "cat"], files=2)


def test_images_in_arrow_files_are_files_of_their_own(pets, files):
    first, second = (pets / f"data-0000{i}-of-00002.arrow" for i in range(2))
    wanted = [*(first / str(i) for i in range(4)), second / "0", files[5], second / "2"]
    assert is_set(pets) and image_paths(pets) == wanted
    found = read_labelled(pets)
    assert found.labels == ["cat"] * 4 + ["dog"] * 3 and found.paths == [wanted[i] for i in (1, 3, 4, 5, 0, 2, 6)]
    assert [image_bytes(path) for path in wanted] == [path.read_bytes() for path in files]
    assert image_version(wanted[2]) == (files[2].stat().st_size, first.stat().st_mtime_ns)
    assert image_exists(wanted[0]) and image_paths(wanted[2]) == [wanted[2]]
    rows = [6, 0, 5, 3]
    inside, outside = FileImages(wanted, SMALL), FileImages(files, SMALL)
    assert torch.equal(inside.pixels(rows), outside.pixels(rows))
    assert read_labelled(pets, ["dog"]).labels == ["dog"] * 3


def test_a_file_that_has_changed_is_read_again(tmp_path, files):
    for i in (1, 2):
        save_set(tmp_path / "one", [{"bytes": files[i].read_bytes(), "path": None}], ["cat"])
        (path,) = image_paths(tmp_path / "one")
        assert image_bytes(path) == files[i].read_bytes()


def test_what_cannot_be_learned_is_told_in_a_line(tmp_path, pets, files):
    inside = {"bytes": files[0].read_bytes(), "path": None}
    both = tmp_path / "both"
    save_set(both / "train", [inside], ["cat"])
    (both / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    for folder, code in [
        (both, "several-splits"),
        (save_set(tmp_path / "a", [inside], [-1], ["cat"]), "missing-label"),
        (save_set(tmp_path / "b", [None], ["cat"]), "row-without-image"),
        (save_set(tmp_path / "c", [], []), "no-images"),
    ]:
        with expect_error(code, DataError):
            read_labelled(folder)
    with expect_error("unreadable-image", DataError):
        FileImages([pets / "data-00000-of-00002.arrow" / "99"], SMALL).pixels([0])
    for names in ("../x.arrow", "x.txt", 3):
        (pets / "state.json").write_text(json.dumps({"_data_files": [{"filename": names}]}))
        with expect_error("bad-image-set", DataError):
            read_labelled(pets)


def test_without_pyarrow_one_line_says_so(pets, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with expect_error("missing-extra", SettingsError):
        read_labelled(pets)


def test_what_datasets_itself_saves_is_read(tmp_path, files):
    datasets = pytest.importorskip("datasets", reason="the real package is not needed for anything else")
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["dog", "cat"])}
    columns = {"image": [str(path) for path in files], "label": [0, 1, 0, 1, 1, 1, 0]}
    whole = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    whole.select([6, 1, 3]).save_to_disk(tmp_path / "saved", num_shards=2)
    found = read_labelled(tmp_path / "saved")
    assert found.labels == ["cat", "cat", "dog"]
    assert [image_bytes(path) for path in found.paths] == [files[i].read_bytes() for i in (1, 3, 6)]


def rewrite(arrow: Path, change, **options) -> None:
    """Replace the columns of an Arrow file, and how its buffers are written."""
    import pyarrow as pa

    with pa.ipc.open_stream(arrow.read_bytes()) as stream:
        table = stream.read_all()
    table = change(table)
    with pa.ipc.new_stream(str(arrow), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_compressed_buffers_are_rejected(pets, compression, dictionary):
    """A few bytes of them take any memory; `datasets` writes none."""
    arrow = pets / "data-00000-of-00002.arrow"

    def with_note(table):
        note = __import__("pyarrow").array(["z" * 100_000] * len(table))
        return table.append_column("note", note.dictionary_encode() if dictionary else note)

    rewrite(arrow, with_note)
    assert len(image_paths(pets)) == 7
    rewrite(arrow, lambda table: table, compression=compression)
    with expect_error("bad-image-set", DataError):
        image_paths(pets)


@pytest.mark.parametrize("kind", ["dictionary", "view", "runs", "null"])
def test_rows_that_share_a_text_are_rejected(tmp_path, files, kind):
    import pyarrow as pa

    pets = save_set(tmp_path / "rows", [{"bytes": None, "path": str(files[0])}] * 9, ["cat"] * 9)
    made = {
        "dictionary": lambda: pa.DictionaryArray.from_arrays([0] * 9, ["z" * 100_000]),
        "view": lambda: pa.array(["z" * 100_000] * 9, pa.string_view()),
        "runs": lambda: pa.RunEndEncodedArray.from_arrays([9], ["z" * 100_000]),
        "null": lambda: pa.nulls(9),
    }[kind]()
    arrow = next(pets.glob("*.arrow"))
    rewrite(arrow, lambda table: table.set_column(table.column_names.index("label"), "label", made))
    if kind == "null":  # labels that nobody has filled in
        assert len(image_paths(pets)) == 9
    else:
        with expect_error("bad-image-set", DataError):
            image_paths(pets)
    bytes_ = pa.nulls(9) if kind == "null" else pa.nulls(9, pa.binary())
    image = pa.StructArray.from_arrays([bytes_, made], ["bytes", "path"])
    labels = pa.array(["cat"] * 9)
    rewrite(
        arrow,
        lambda table: pa.table({"image": image, "label": labels}).replace_schema_metadata(table.schema.metadata),
    )
    with expect_error("bad-image-set", DataError):
        image_paths(pets)
