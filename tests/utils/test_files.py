import os
import time
from pathlib import Path
from typing import NoReturn

import pytest

from fovea.utils.files import atomic_file, atomic_folder, complete_bytes, delete_abandoned, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def interrupted_write(path: Path) -> NoReturn:
    path.write_bytes(b"half")
    raise RuntimeError


def test_a_file_is_old_until_it_is_new(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "a.txt"
    write_atomically(file, b"old")
    with atomic_file(file) as partial:
        partial.write_bytes(b"ne")
        assert file.read_bytes() == b"old"
        partial.write_bytes(b"new")
    assert file.read_bytes() == b"new"
    assert names(file.parent) == ["a.txt"]


def test_a_file_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.txt", b"old")
    with pytest.raises(RuntimeError), atomic_file(tmp_path / "a.txt") as partial:
        interrupted_write(partial)
    assert (tmp_path / "a.txt").read_bytes() == b"old"
    assert names(tmp_path) == ["a.txt"]


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a.txt") as first, atomic_file(tmp_path / "a.txt") as second:
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert (tmp_path / "a.txt").read_bytes() == b"first", "which left its block last"


def test_what_another_process_is_writing_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"four")
    with atomic_file(tmp_path / "b") as partial:
        partial.write_bytes(b"half")
        assert complete_bytes(tmp_path) == 4
    assert complete_bytes(tmp_path) == 8
    assert complete_bytes(tmp_path / "none") == 0


def test_a_file_that_vanishes_while_they_are_counted_has_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"four")
    (tmp_path / "b").symlink_to(tmp_path / "deleted")
    assert complete_bytes(tmp_path) == 4


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


def test_what_a_killed_writer_left_is_not_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "half").write_bytes(b"half")
    with atomic_folder(tmp_path / "out") as partial:
        (partial / "whole").write_bytes(b"whole")
    assert names(tmp_path / "out") == ["whole"]


def test_files_of_a_folder_are_for_others_to_read_as_the_umask_says(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "new") as folder:
        (folder / "inner").mkdir()
        for name in ("a", "inner/b"):
            (folder / name).touch(mode=0o600)
    (tmp_path / "any").touch()
    expected = (tmp_path / "any").stat().st_mode
    assert [(tmp_path / "new" / name).stat().st_mode for name in ("a", "inner/b")] == [expected, expected]
