"""Files: written whole or not at all, and strangers' files within bounds."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NoReturn

import pytest

from fovea_gym.errors import DataError
from fovea_gym.utils.bounded import append_to, check_tree, open_file, read_file, read_lines
from fovea_gym.utils.files import atomic_file, atomic_folder, complete_bytes, delete_abandoned, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def interrupted_write(path: Path) -> NoReturn:
    path.write_bytes(b"half")
    raise RuntimeError


def test_a_file_is_old_until_it_is_new(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "a.txt"
    write_atomically(file, b"old")
    with pytest.raises(RuntimeError), atomic_file(file) as partial:
        interrupted_write(partial)
    assert (file.read_bytes(), names(file.parent)) == (b"old", ["a.txt"])
    with atomic_file(file) as partial:
        partial.write_bytes(b"ne")
        assert file.read_bytes() == b"old"
        partial.write_bytes(b"new")
    assert (file.read_bytes(), names(file.parent)) == (b"new", ["a.txt"])


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a.txt") as first, atomic_file(tmp_path / "a.txt") as second:
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert (tmp_path / "a.txt").read_bytes() == b"first", "which left its block last"


def test_files_being_written_or_deleted_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"four")
    with atomic_file(tmp_path / "b") as partial:
        partial.write_bytes(b"half")
        assert complete_bytes(tmp_path) == 4
    assert complete_bytes(tmp_path) == 8
    (tmp_path / "c").symlink_to(tmp_path / "deleted while they are counted")
    assert complete_bytes(tmp_path) == 8
    assert complete_bytes(tmp_path / "none") == 0


def test_a_temporary_file_is_deleted_a_day_after_its_process_was_killed(tmp_path: Path) -> None:
    for name, hours in ((".a.partial", 25), (".b.partial", 23), ("c", 25), (".d", 25)):
        (tmp_path / name).write_bytes(b"half")
        then = time.time() - hours * 3600
        os.utime(tmp_path / name, (then, then))
    delete_abandoned(tmp_path)
    assert names(tmp_path) == [".b.partial", ".d", "c"]


def test_a_folder_is_complete_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "out") as partial:
        interrupted_write(partial / "a.txt")
    assert names(tmp_path) == []
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    with atomic_folder(Path()) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "a.txt").write_bytes(b"a")
        assert names(tmp_path / "out") == []
    assert names(tmp_path / "out") == ["inner"]
    assert names(tmp_path) == ["out"]


def test_what_a_killed_writer_left_is_not_in_the_folder_and_others_may_read_it_as_the_umask_says(
    tmp_path: Path,
) -> None:
    (tmp_path / ".new.partial").mkdir()
    (tmp_path / ".new.partial" / "half").write_bytes(b"half")
    with atomic_folder(tmp_path / "new") as folder:
        (folder / "inner").mkdir()
        for name in ("a", "inner/b"):
            (folder / name).touch(mode=0o600)
    (tmp_path / "any").touch()
    expected = (tmp_path / "any").stat().st_mode
    assert [(tmp_path / "new" / name).stat().st_mode for name in ("a", "inner/b")] == [expected, expected]
    assert names(tmp_path / "new") == ["a", "inner"]


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
    with pytest.raises(DataError, match=r"\bfifo\b"):
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
    with pytest.raises(DataError, match=r"\bsparse\b.*\b1 MiB"):
        read_file(file, max_mib=1)
    with pytest.raises(DataError, match=r"\bsparse\b.*\b16 MiB"):
        list(read_lines(file))


def test_a_trackers_folder_may_hold_links(tmp_path: Path) -> None:
    """W&B links its logs into its cache; what it has there is read by nobody."""
    logs = tmp_path / "wandb" / "run-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to("/root/.cache/wandb/core.log")
    check_tree(tmp_path, ["wandb"])
    with pytest.raises(DataError, match="leads out of"):
        check_tree(tmp_path)
