"""Whole files or none; what dead writers left goes at once, what living ones hold stays; one replaces at a time."""

import errno
import hashlib
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from expect import expect_error
from protosteer.errors import ProtosteerError, ProtosteerWarning
from protosteer.util import files
from protosteer.util.files import (
    file_hash,
    open_regular,
    read_regular,
    real,
    remove_leftovers,
    replace_folder,
    replacing,
    write_and_hold,
    write_atomically,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_leftovers_of_the_dead_go_whatever_their_age_and_those_of_the_living_stay(tmp_path):
    model = tmp_path / "shop.protosteer"
    write_atomically(model, b"old")
    for name in (".shop.protosteer.dead.tmp", ".shop.protosteer.0123.part.dead.tmp", ".other.dead.tmp"):
        (tmp_path / name).write_bytes(b"secret")
    file, living = files._new_temporary(model)
    left = remove_leftovers(tmp_path, model.name)
    assert left == [Path(living)] and names(tmp_path) == sorted([Path(living).name, ".other.dead.tmp", model.name])
    file.close()
    assert remove_leftovers(tmp_path, model.name) == [] and names(tmp_path) == [".other.dead.tmp", model.name]


def test_every_write_removes_what_dead_writers_of_the_same_file_left(tmp_path):
    path = tmp_path / "shop.protosteer"
    (tmp_path / ".shop.protosteer.dead.tmp").write_bytes(b"secret")
    write_atomically(path, b"new")
    assert names(tmp_path) == [path.name] and path.read_bytes() == b"new"


def test_a_checkpoint_stays_as_long_as_it_is_held_or_young(tmp_path):
    checkpoint = tmp_path / ".shop.protosteer.0123.part"
    held = write_and_hold(checkpoint, b"state")
    held = (write_and_hold(checkpoint, b"later state"), held.close())[0]
    assert remove_leftovers(tmp_path, "shop.protosteer") == [checkpoint]
    held.close()
    assert remove_leftovers(tmp_path, "shop.protosteer", older_than=60) == [checkpoint]
    os.utime(checkpoint, (0, 0))
    assert remove_leftovers(tmp_path, "shop.protosteer", older_than=60) == [] and not names(tmp_path)


def test_without_locks_age_decides_and_writing_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_try_lock", lambda handle: None)
    old, young = tmp_path / ".m.old.tmp", tmp_path / ".m.young.tmp"
    for path in (old, young):
        path.write_bytes(b"secret")
    os.utime(old, (0, 0))
    with pytest.warns(ProtosteerWarning, match="cannot be locked"), replacing(tmp_path / "m"):
        write_atomically(tmp_path / "m", b"new")
    assert names(tmp_path) == [young.name, "m"]


def test_what_is_no_file_of_ours_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / ".m.pipe.tmp")
    (tmp_path / ".m.folder.tmp").mkdir()
    assert len(remove_leftovers(tmp_path, "m")) == 2


def test_a_temporary_file_that_was_taken_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    """Between its making and its lock somebody else may have locked and removed it."""
    lock, taken = files._try_lock, []

    def robbed(handle: int) -> bool | None:
        if not taken:
            taken.extend(tmp_path.glob(".m.*.tmp"))
            taken[0].unlink()
        return lock(handle)

    monkeypatch.setattr(files, "_try_lock", robbed)
    write_atomically(tmp_path / "m", b"new")
    assert taken and names(tmp_path) == ["m"] and (tmp_path / "m").read_bytes() == b"new"


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:3]))
    write_atomically(tmp_path / "m", b"0123456789")
    assert (tmp_path / "m").read_bytes() == b"0123456789"


COUNTER = """
import sys
from pathlib import Path
from protosteer.util.files import replacing, write_atomically
path = Path(sys.argv[1])
for _ in range(25):
    with replacing(path):
        write_atomically(path, str(int(path.read_text()) + 1).encode())
"""


def test_no_update_is_lost_between_processes_and_threads(tmp_path):
    path = tmp_path / "number"
    path.write_text("0")
    command = [sys.executable, "-c", COUNTER, str(path)]
    other = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})

    def count() -> None:
        for _ in range(25):
            with replacing(path):
                write_atomically(path, str(int(path.read_text()) + 1).encode())

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert other.wait() == 0 and path.read_text() == "75" and names(tmp_path) == ["number"]


def test_who_waits_too_long_is_told_so(tmp_path):
    with replacing(tmp_path / "a"), expect_error("locked", ProtosteerError), replacing(tmp_path / "b", seconds=0.05):
        pass


def test_a_read_only_folder_can_be_locked_and_none_needs_none(tmp_path):
    tmp_path.chmod(0o500)
    with replacing(tmp_path / "m"):
        pass
    tmp_path.chmod(0o700)
    with replacing(tmp_path / "none" / "m"):
        pass
    assert names(tmp_path) == []


def test_a_link_that_leads_back_to_itself_is_refused_in_one_line(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with expect_error("link-loop", ProtosteerError):
        real(tmp_path / "a")
    (tmp_path / "new").symlink_to("target")
    assert real(tmp_path / "new") == (tmp_path / "target").resolve()


def test_a_regular_file_is_read_whole_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert read_regular(tmp_path / "a") == read_regular(str(tmp_path / "link")) == b"content"


@pytest.mark.parametrize("path", ["pipe", "/dev/zero", "/dev/tty"])
def test_pipes_and_devices_are_rejected_at_once(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(tmp_path / path)


def test_what_became_a_pipe_after_the_look_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a").touch()
    status = os.stat(tmp_path / "a")
    monkeypatch.setattr(os, "stat", lambda path: status)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "pipe")


def test_folders_and_absent_files_are_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_hash_of_a_file_longer_than_one_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content := bytes(range(256)) * 5000)
    assert file_hash(tmp_path / "a", "sha256") == hashlib.sha256(content).hexdigest()


def test_a_leftover_dated_in_the_future_is_removed(tmp_path):
    leftover = tmp_path / ".shop.protosteer.abc.tmp"
    leftover.touch()
    os.utime(leftover, (2**32, 2**32))
    assert remove_leftovers(tmp_path, "shop.protosteer") == [] and not leftover.exists()


OLD, NEW = {"a": b"old", "b": b"old"}, {"a": b"new", "c": b"new"}
DIES = """
import os, sys
from pathlib import Path
from protosteer.util import files

def dies(*arguments):
    os._exit(9)

folder, moment, exchange = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "exchange"
swap, rename = files._exchange, Path.rename
files._exchange = (lambda *pair: (swap(*pair), dies())) if exchange else lambda *pair: False
if moment == "writing":
    files.write_atomically = dies
else:
    Path.rename = lambda path, target: (rename(path, target), dies())
files.replace_folder(folder, {"a": b"new", "c": b"new"})
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("moment", "how"), [("writing", "exchange"), ("swap", "exchange"), ("swap", "two renames")])
def test_a_folder_is_old_or_new_wherever_its_writer_is_killed(tmp_path, moment, how):
    """What is left goes with the next write, and where folders cannot be exchanged, the old one returns first."""
    folder = tmp_path / "x"
    replace_folder(folder, OLD)
    assert contents(folder) == OLD and names(tmp_path) == ["x"]
    died = subprocess.run([sys.executable, "-c", DIES, folder, moment, how], env={**os.environ}, check=False)
    assert died.returncode == 9
    (hidden,) = (path for path in tmp_path.iterdir() if path != folder)
    if how == "exchange":
        assert contents(folder) == (OLD if moment == "writing" else NEW)
    else:
        assert not folder.exists()
        files._remove_dead_folder(hidden, folder)
        assert contents(folder) == OLD and names(tmp_path) == ["x"]
    replace_folder(folder, NEW)
    assert contents(folder) == NEW and names(tmp_path) == ["x"]


def test_only_dead_hidden_folders_of_the_same_name_go(tmp_path):
    alive, other, dead = tmp_path / ".x.alive", tmp_path / ".x.other", tmp_path / ".x.dead"
    for place in (alive / "new", other / "mine", dead / "new", tmp_path / ".y.dead" / "new"):
        place.mkdir(parents=True)
    (tmp_path / ".x.link").symlink_to(dead)
    with files._open_folder(alive) as lock:
        assert files._try_lock(lock)
        replace_folder(tmp_path / "x", NEW)
    assert names(tmp_path) == [".x.alive", ".x.link", ".x.other", ".y.dead", "x"]


def test_a_folder_keeps_its_permissions(tmp_path):
    replace_folder(tmp_path / "x", OLD)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o777 & ~files._umask()
    (tmp_path / "x").chmod(0o700)
    replace_folder(tmp_path / "x", NEW)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o700


def test_a_file_keeps_its_owner_and_permissions_and_a_copy_gets_them(tmp_path, monkeypatch):
    """Who may not give files away keeps at least the group."""
    path, copy, owners = tmp_path / "m", tmp_path / "copy", []
    write_atomically(path, b"old")
    assert path.stat().st_mode & 0o777 == 0o666 & ~files._umask()
    path.chmod(0o600)
    write_atomically(path, b"new")
    write_atomically(copy, b"copy", like=path)
    assert path.stat().st_mode & 0o777 == copy.stat().st_mode & 0o777 == 0o600
    user, group = path.stat().st_uid, path.stat().st_gid
    monkeypatch.setattr(os, "chown", lambda file, *ids: owners.append(ids))
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    write_atomically(path, b"newer")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "getegid", lambda: group + 1)
    write_atomically(path, b"newest")
    assert owners == [(-1, group), (user, group)]


def test_a_file_is_synced_before_its_rename_and_the_folder_after(tmp_path, monkeypatch):
    """Else a crash of the machine could leave the new name without the content, or lose both."""
    calls = []

    def watched(name, call, place):
        monkeypatch.setattr(os, name, lambda *arguments: (calls.append((name, place(*arguments))), call(*arguments))[1])

    watched("fsync", os.fsync, lambda handle: "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
    watched("replace", os.replace, lambda old, new: Path(new).name)
    watched("rename", os.rename, lambda old, new: Path(new).name)
    write_atomically(tmp_path / "m", b"x")
    expected = [("fsync", "file"), ("replace", "m"), ("fsync", "folder")]
    assert calls == expected
    calls.clear()
    monkeypatch.setattr(files, "_exchange", lambda one, other: calls.append(("exchange", other.name)) or True)
    replace_folder(tmp_path / "x", {"a": b"1"})
    replace_folder(tmp_path / "x", {"a": b"2"})
    inside = [("fsync", "file"), ("replace", "a"), ("fsync", "folder")]
    last = [("fsync", "folder")]
    assert calls == [*inside, ("rename", "x"), *last, *inside, ("exchange", "x"), *last]


def test_a_file_that_moves_to_another_disk_is_synced_before_the_old_one_goes(tmp_path, monkeypatch):
    source, target, calls = tmp_path / "a.png", tmp_path / "b" / "a.png", []
    source.write_bytes(b"pixels")
    target.parent.mkdir()
    os.utime(source, ns=(1, 2))
    replace, fsync, unlink = os.replace, os.fsync, Path.unlink

    def replaced(old: Path, new: Path) -> None:
        if Path(old).parent != Path(new).parent:
            raise OSError(errno.EXDEV, "another disk")
        calls.append("replace")
        replace(old, new)

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), fsync(file))[1])
    monkeypatch.setattr(Path, "unlink", lambda path: (calls.append("unlink"), unlink(path))[1])
    files.move_synced(source, target)
    assert target.read_bytes() == b"pixels" and target.stat().st_mtime_ns == 2 and not source.exists()
    assert [call for call in calls if call != "fsync"] == ["replace", "unlink"] and calls[0] == "fsync"
    assert [*target.parent.iterdir()] == [target]
