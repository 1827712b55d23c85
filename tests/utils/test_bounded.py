"""Files of a stranger's folder: what is not a plain file inside it, or too large, is refused in a line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fovea.errors import DataError
from fovea.utils.bounded import append_to, check_tree, open_file, read_file, read_lines


def test_a_file_is_read_whole_and_by_lines(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"one\ntwo")
    (tmp_path / "link").symlink_to("a")
    assert read_file(file, within=tmp_path) == read_file(tmp_path / "link", within=tmp_path) == b"one\ntwo"
    assert list(read_lines(file)) == [b"one\n", b"two"]
    check_tree(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")


def test_fifos_and_devices_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises((DataError, IsADirectoryError)):
            read_file(path)
    with pytest.raises(DataError, match=r"fifo is neither a file nor a folder"):
        check_tree(tmp_path)


def test_nothing_is_read_or_written_through_a_link_that_leaves(tmp_path: Path) -> None:
    folder, private = tmp_path / "run", tmp_path / "private"
    (private / "keys").mkdir(parents=True)
    (private / "keys" / "id").write_text("secret")
    folder.mkdir()
    (folder / "file").symlink_to(private / "keys" / "id")
    (folder / "folder").symlink_to(private)
    (folder / "up").symlink_to("../private/keys")
    for path in ("file", "folder/keys/id", "up/id", "../private/keys/id"):
        with pytest.raises(DataError, match=r"that leads out of .*run, and nothing is read or written through it"):
            open_file(folder / path, within=folder)
    with pytest.raises(DataError, match=r"leads out of"):
        check_tree(folder)
    with pytest.raises(OSError, match=r"symbolic links"):
        append_to(folder / "file")
    # the folder itself may be reached by a link
    (tmp_path / "latest").symlink_to("run")
    (folder / "own").write_text("x")
    assert read_file(tmp_path / "latest" / "own", within=tmp_path / "latest") == b"x"


def test_sparse_files_take_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "sparse"
    file.touch()
    os.truncate(file, 1 << 40)
    with pytest.raises(DataError, match=r"sparse has more than 1 MiB"):
        read_file(file, max_mib=1)
    with pytest.raises(DataError, match=r"sparse has a line of more than 16 MiB"):
        list(read_lines(file))


def test_a_trackers_folder_may_hold_links(tmp_path: Path) -> None:
    """W&B links its logs into its cache; what it has there is read by nobody."""
    logs = tmp_path / "wandb" / "run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to("/root/.cache/wandb/core.log")
    check_tree(tmp_path, ["wandb"])
    with pytest.raises(DataError, match="leads out of"):
        check_tree(tmp_path)
