"""Only regular files are opened, and nothing else makes anyone wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protosteer.util.reading import open_regular, read_regular


def test_a_regular_file_is_read_whole_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert read_regular(tmp_path / "a") == read_regular(str(tmp_path / "link")) == b"content"


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "pipe")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/tty"])
def test_devices_are_refused(path: str) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(path)


def test_what_became_a_pipe_after_the_look_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a").touch()
    seen = os.stat(tmp_path / "a")
    monkeypatch.setattr(os, "stat", lambda path: seen)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "pipe")


def test_folders_and_absent_files_are_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
