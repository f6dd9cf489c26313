"""Downloads from a local server that may be cut, dead, wrong or unable to resume; archives, also evil ones."""

import contextlib
import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from expect import expect_error
from protosteer.data import downloads
from protosteer.data.downloads import Remote, fetch, unpack
from protosteer.errors import DataError

CONTENT = np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8).tobytes()
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """`cuts`: after how many bytes each of the coming answers breaks off. `asked`: every (path, Range)."""

    def __init__(self, resumes=True):
        self.resumes, self.cuts, self.asked = resumes, [], []
        self.files = {"/file.bin": CONTENT}
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        asked = self.headers.get("Range")
        self.server.asked.append((self.path, asked))
        if self.path not in self.server.files:
            return self.send_error(404)
        body = self.server.files[self.path]
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.resumes else 0
        if start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.end_headers()
            return None
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:][: self.server.cuts.pop(0) if self.server.cuts else None])
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(**options):
        servers.append(Server(**options))
        return servers[-1]

    yield start
    for server in servers:
        stop(server)


def remote(*servers, md5=MD5, name="file.bin"):
    return Remote(name, len(CONTENT), tuple(server.address for server in servers), md5)


def stop(server):
    server.shutdown()
    server.server_close()
    server.thread.join()
    return server


def dead():
    """A server that has been shut down: nobody listens at its address."""
    return stop(Server())


def test_a_plain_download(serve, tmp_path, capsys):
    path = fetch(remote(serve()), tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "file.bin" and path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["file.bin"]
    out, lines = capsys.readouterr()
    assert not out and lines.startswith("fetching file.bin (1,000,000 bytes) from 127.0.0.1")
    assert len(lines.splitlines()) == 1


def test_a_cut_connection_is_resumed_where_it_broke_off(serve, tmp_path):
    server, said = serve(), []
    server.cuts = [400_000, 300_000]
    assert fetch(remote(server), tmp_path, said.append).read_bytes() == CONTENT
    starts = [int(asked.removeprefix("bytes=").rstrip("-")) for _, asked in server.asked if asked]
    assert len(server.asked) == 3 and 300_000 < starts[0] <= 400_000 < starts[1] <= 700_000
    assert sum("was cut" in line for line in said) == 2


def test_a_part_left_by_an_earlier_run_is_completed(serve, tmp_path):
    server = serve()
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:777_777])
    assert fetch(remote(server), tmp_path, print).read_bytes() == CONTENT
    assert server.asked == [("/file.bin", "bytes=777777-")] and not (tmp_path / "file.bin.part").exists()


def test_what_came_is_kept_when_all_mirrors_fail(serve, tmp_path):
    server = serve()
    server.cuts = [500_000, 0]
    with expect_error("download-failed", DataError):
        fetch(remote(server), tmp_path, print)
    kept = (tmp_path / "file.bin.part").read_bytes()
    assert 400_000 < len(kept) <= 500_000 and CONTENT.startswith(kept)


@pytest.mark.parametrize("more", [b"", b"more"])
def test_a_part_that_is_complete_or_too_long(serve, tmp_path, more):
    (tmp_path / "file.bin.part").write_bytes(CONTENT + more)
    assert fetch(remote(serve()), tmp_path, print).read_bytes() == CONTENT


def test_a_part_of_another_file_does_not_stand_in_the_way(serve, tmp_path):
    server, said = serve(), []
    (tmp_path / "file.bin.part").write_bytes(b"x" * 5000)
    assert fetch(remote(server), tmp_path, said.append).read_bytes() == CONTENT
    assert [asked for _, asked in server.asked] == ["bytes=5000-", None]
    assert any("starting again" in line for line in said)


def test_a_server_that_cannot_resume_is_asked_for_everything(serve, tmp_path):
    server = serve(resumes=False)
    (tmp_path / "file.bin.part").write_bytes(b"x" * 5000)
    assert fetch(remote(server), tmp_path, print).read_bytes() == CONTENT and len(server.asked) == 1


def test_a_server_that_cannot_resume_and_cuts_every_time_is_given_up(serve, tmp_path):
    server = serve(resumes=False)
    server.cuts = [300_000] * 20
    with expect_error("download-failed", DataError):
        fetch(remote(server), tmp_path, print)
    assert len(server.asked) == 2


def test_the_next_mirror_is_tried(serve, tmp_path):
    first, second, last, said = dead(), serve(), serve(), []
    second.files = {}
    assert fetch(remote(first, second, last), tmp_path, said.append).read_bytes() == CONTENT
    assert any("cannot be reached" in line for line in said) and any("HTTP 404" in line for line in said)


def test_a_wrong_file_is_not_kept(serve, tmp_path):
    wrong, right = serve(), serve()
    wrong.files = {"/file.bin": b"an error page"}
    with expect_error("download-failed", DataError) as caught:
        fetch(remote(wrong), tmp_path / "x", print)
    found = hashlib.md5(b"an error page").hexdigest()
    assert f"md5 {found}, not {MD5}" in str(caught.value) and "\n" not in str(caught.value)
    assert not list((tmp_path / "x").iterdir())
    assert fetch(remote(wrong, right), tmp_path, print).read_bytes() == CONTENT


def test_no_network_is_one_line(tmp_path):
    with expect_error("download-failed", DataError):
        fetch(remote(dead()), tmp_path / "x", print)
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_written_to(serve, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with expect_error("cannot-write", DataError):
        fetch(remote(serve()), tmp_path / "file" / "x", print)


def test_lines_tell_of_progress_in_long_downloads(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "PROGRESS_MIN_SIZE", 0)
    said = []
    fetch(remote(serve()), tmp_path, said.append)
    assert said[1:] == [f"file.bin: {share}% of 1.0 MB" for share in range(10, 100, 10)]


def tar(path, names, mode="w:gz", change=lambda entry: entry):
    with tarfile.open(path, mode) as bundle:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = len(name)
            bundle.addfile(change(entry), io.BytesIO(name.encode()))
    return path


def zipped(path, names):
    with zipfile.ZipFile(path, "w") as bundle:
        for name in names:
            bundle.writestr(name, name)
    return path


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("make", [tar, zipped])
def test_only_the_folder_is_unpacked(tmp_path, make):
    archive = make(tmp_path / "archive", ["set/a.txt", "./set/deep/b.txt", "other/c.txt", "readme.txt"])
    folder = unpack(archive, "set", tmp_path / "out")
    assert folder == tmp_path / "out" / "set" and tree(tmp_path / "out") == ["set/a.txt", "set/deep/b.txt"]
    assert (folder / "a.txt").read_text() == "set/a.txt"


@pytest.mark.parametrize("make", [tar, zipped])
@pytest.mark.parametrize("name", ["../evil.txt", "set/../../evil.txt", "/evil.txt", "set/../evil.txt"])
def test_nothing_is_put_outside_the_folder(tmp_path, make, name):
    archive = make(tmp_path / "archive", ["set/a.txt", name])
    with contextlib.suppress(DataError):  # a name that leads out is refused or cut
        unpack(archive, "set", tmp_path / "out")
    found = set(tree(tmp_path)) - {"archive", "out/set/a.txt"}
    assert found <= {"out/set/evil.txt"} and not Path("/evil.txt").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_that_lead_out_and_devices_are_refused(tmp_path, kind):
    def change(entry):
        entry.type, entry.linkname, entry.size = kind, "/etc/passwd", 0
        return entry

    with expect_error("bad-archive", DataError):
        unpack(tar(tmp_path / "archive", ["set/a.txt"], change=change), "set", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_nothing_is_half_there(tmp_path):
    archive = tar(tmp_path / "archive", [f"set/{i}" for i in range(500)])
    archive.write_bytes(archive.read_bytes()[:-500])
    (tmp_path / "text").write_text("no archive")
    for bad in (archive, tmp_path / "text", zipped(tmp_path / "zip", ["other/a.txt"])):
        with expect_error("bad-archive", DataError):
            unpack(bad, "set", tmp_path / "out")
        assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("change", [{"flag_bits": 1}, {"compress_type": 99}, {"file_size": 10**12}])
def test_zips_that_are_encrypted_unknown_or_bombs_are_one_line(tmp_path, change):
    with zipfile.ZipFile(tmp_path / "archive", "w") as bundle:
        bundle.writestr("set/a.txt", "text")
        for key, value in change.items():
            setattr(bundle.infolist()[0], key, value)
    with expect_error("bad-archive", DataError) as caught:
        unpack(tmp_path / "archive", "set", tmp_path / "out")
    assert "\n" not in str(caught.value) and not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_bombs_do_not_fill_the_disk(tmp_path, kind):
    many = bytes(100_000_000)
    if kind == "zip":
        with zipfile.ZipFile(tmp_path / "archive", "w", zipfile.ZIP_DEFLATED) as bundle:
            bundle.writestr("set/a", many)
    else:
        with tarfile.open(tmp_path / "archive", "w:gz") as bundle:
            entry = tarfile.TarInfo("set/a")
            entry.size = len(many)
            bundle.addfile(entry, io.BytesIO(many))
    assert (tmp_path / "archive").stat().st_size < 200_000
    with expect_error("bad-archive", DataError):
        unpack(tmp_path / "archive", "set", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_what_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "set").mkdir()
    with expect_error("incomplete-folder", DataError):
        unpack(zipped(tmp_path / "archive", ["set/a.txt"]), "set", tmp_path)
