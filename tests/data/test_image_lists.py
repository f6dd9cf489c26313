"""Lists of images with labels, in three formats; each mistake is told in one line with its place."""

import json
from pathlib import Path

import pytest

from expect import expect_error
from protosteer.data.class_folders import read_folder
from protosteer.data.image_lists import is_list, read_paths, read_table
from protosteer.data.sources import image_paths, read_labelled
from protosteer.errors import DataError
from set_toys import save

Pairs = list[tuple[object, object]]
PAIRS: Pairs = [("dog/b.png", "dog"), ("cat/a.png", "cat"), ("cat/c.png", "cat")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, _ in PAIRS:
        save(tmp_path / str(name))
    return tmp_path


def write(path: Path, pairs: Pairs) -> Path:
    if path.suffix == ".csv":
        path.write_text("label,path,note\n" + "".join(f"{label},{name},x\n" for name, label in pairs))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"path": n, "label": label}) + "\n\n" for n, label in pairs))
    else:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        names, labels = zip(*pairs, strict=True)
        pyarrow.parquet.write_table(pa.table({"path": names, "label": labels}), path)
    return path


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_list_is_read_as_the_folder_that_its_images_lie_in(folder, suffix, monkeypatch):
    path = write(folder / f"list.{suffix}", PAIRS)
    assert is_list(path) and not is_list(folder)
    for place in (folder, folder.parent):
        monkeypatch.chdir(place)
        assert read_labelled(path) == read_folder(folder)
    assert image_paths(path) == [folder / str(name) for name, _ in PAIRS]
    assert read_labelled(path, ["dog"]) == read_folder(folder, ["dog"])
    with expect_error("missing-class", DataError):
        read_labelled(path, ["dog", "fox"])


def test_paths_may_be_whole_or_those_of_the_current_folder(folder, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    whole = write(elsewhere / "whole.csv", [(folder / str(name), label) for name, label in PAIRS])
    assert read_table(whole) == read_folder(folder)
    here = write(elsewhere / "here.csv", PAIRS)
    monkeypatch.chdir(folder)
    assert read_table(here) == read_folder(Path("."))
    monkeypatch.chdir(folder.parent)
    with expect_error("missing-file", DataError):
        read_table(here)
    assert read_paths(here) == [elsewhere / str(name) for name, _ in PAIRS]  # whoever reads them will tell


def test_numbers_are_labels_too(folder):
    assert read_table(write(folder / "x.jsonl", [("dog/b.png", 7), ("cat/a.png", 10)])).labels == ["10", "7"]
    assert read_table(write(folder / "x.parquet", [("dog/b.png", 7)])).labels == ["7"]


@pytest.mark.parametrize(
    "suffix, text, told",
    [
        (".csv", "file,label\na.png,cat\n", "missing-column"),
        (".csv", "path,class\na.png,cat\n", "missing-column"),
        (".csv", "", "missing-column"),
        (".csv", "path,label\n", "no-images"),
        (".csv", "label,path\ncat\n", "bad-list"),
        (".csv", "path,label\ncat/a.png,cat\ncat/c.png\n", "bad-label"),
        (".csv", "path,label\ncat/a.png,cat\n./cat/a.png,cat\n", "repeated-image"),
        (".csv", "path,label\ncat/a.png,cat\ncat/x.png,cat\n", "missing-file"),
        (".jsonl", '{"path": "cat/a.png"', "bad-list"),
        (".jsonl", "[1]", "bad-list"),
        (".jsonl", '{"path": "cat/a.png"}', "missing-column"),
        (".jsonl", '{"path": "cat/a.png", "label": 0.5}', "bad-label"),
        (".jsonl", '{"path": "cat/a.png", "label": true}', "bad-label"),
        (".jsonl", '{"path": 3, "label": "cat"}', "bad-list"),
        (".jsonl", "[" * 100_000, "bad-list"),
    ],
    ids=range(15),
)
def test_mistakes_are_told_in_one_line(folder, suffix, text, told):
    (folder / "x").with_suffix(suffix).write_text(text)
    with expect_error(told, DataError) as caught:
        read_table((folder / "x").with_suffix(suffix))
    assert "\n" not in str(caught.value)


def test_a_broken_parquet_file_is_told(folder):
    path = write(folder / "x.parquet", PAIRS)
    for name, text in (("path", "poth"), ("label", "lobel")):
        path.write_bytes(write(path, PAIRS).read_bytes().replace(name.encode(), text.encode()))
        with expect_error("missing-column", DataError, name=name):
            read_table(path)
    path = write(folder / "x.parquet", PAIRS)
    path.write_bytes(path.read_bytes()[:-9])
    with expect_error("bad-list", DataError):
        read_table(path)


def bomb(path: Path, rows: int, text: str, **options: object) -> Path:
    """A Parquet list whose rows all have one long text."""
    import pyarrow.parquet

    values = pyarrow.array([text] * rows) if rows < 100 else pyarrow.DictionaryArray.from_arrays([0] * rows, [text])
    table = pyarrow.table({"path": values, "label": values})
    pyarrow.parquet.write_table(table, path, **{"compression": "zstd", "write_statistics": False, **options})
    return path


@pytest.mark.parametrize(
    ("rows", "length", "options"),
    [
        (30_000, 20_000, {}),
        (200_000, 3, {}),
        (30_000, 4000, {}),
        (1, 30_000_000, {"use_dictionary": False}),
        (1, 30_000_000, {"use_dictionary": False, "data_page_version": "2.0"}),
        (50, 1000, {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY", "compression": "none"}),
    ],
    ids=["long", "many", "both", "compressed", "compressed-v2", "prefixes"],
)
def test_a_small_parquet_list_cannot_take_much_memory(tmp_path, rows, length, options):
    """Rejected before rows are made of it; the message stays short."""
    path = bomb(tmp_path / "x.parquet", rows, "z" * length, **options)
    assert path.stat().st_size < 60_000
    for read in (read_paths, read_table):
        with expect_error("bad-list", DataError) as caught:
            read(path)
        assert len(str(caught.value)) < 500


def test_forged_sizes_in_the_footer_do_not_help(tmp_path):
    """Pages are decompressed by their own headers."""
    path = bomb(tmp_path / "x.parquet", 1, "z" * 30_000_000, use_dictionary=False)
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(path)
    data, value = path.read_bytes(), 2 * metadata.row_group(0).column(0).total_uncompressed_size
    varint = bytes((value >> shift & 127) | 128 for shift in (0, 7, 14)) + bytes([value >> 21])
    assert varint in data
    path.write_bytes(data.replace(varint, b"\x82\x80\x80\x00"))  # 1, in as many bytes
    assert pyarrow.parquet.read_metadata(path).row_group(0).column(0).total_uncompressed_size == 1
    with expect_error("bad-list", DataError):
        read_paths(path)
    place = data.index(b"\x04path")  # the schema's name; what follows are those of columns, which nobody compares
    path.write_bytes(data[: place + 5] + data[place + 5 :].replace(b"\x04path", b"\x04pith"))
    with expect_error("bad-list", DataError):
        read_paths(path)


def test_a_column_of_lists_is_bounded_too(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = pa.table({"path": [["z" * 30_000_000]]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", compression="zstd", use_dictionary=False)
    with expect_error("bad-list", DataError) as caught:
        read_paths(tmp_path / "x.parquet")
    assert "far larger" in str(caught.value)


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_honest_parquet_lists_are_read(tmp_path, compression, version, dictionary):
    """Names that compress well, in several pages and row groups, with statistics and without."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    names = [f"photos/of/one/and/the/same/kind/{i:08}.png" for i in range(600)]
    pyarrow.parquet.write_table(
        pa.table({"path": names, "label": [None] * len(names)}),
        tmp_path / "x.parquet",
        compression=compression,
        data_page_version=version,
        use_dictionary=dictionary,
        write_statistics=dictionary,
        write_page_checksum=dictionary,
        row_group_size=250,
        data_page_size=2048,
    )
    assert read_paths(tmp_path / "x.parquet") == [tmp_path / name for name in names]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_path_is_no_longer_than_a_file_systems(folder, suffix):
    assert read_paths(write(folder / f"x.{suffix}", [("y" * 4096, "cat")]))
    with expect_error("bad-list", DataError):
        read_paths(write(folder / f"x.{suffix}", [("y" * 4097, "cat")]))
