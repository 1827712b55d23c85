from __future__ import annotations

from pathlib import Path

from fovea.report.curves import Tail


def read(tail: Tail) -> tuple[tuple[str, ...], bool]:
    appended = tail.read()
    return appended.lines, appended.begun_anew


def test_every_line_is_read_once_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert read(tail) == ((), False), "there is no file yet"
    path.write_text("one\ntw")
    assert read(tail) == (("one",), False)
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert read(tail) == (("two", "three"), False)
    assert read(tail) == ((), False)
    (tmp_path / "log").write_text("a\u2028b\nc\r\n", encoding="utf-8", newline="")
    assert read(Tail(tmp_path / "log"))[0] == ("a\u2028b", "c\r"), "a line separator inside a line does not cut it"


def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\n")
    tail = Tail(path)
    tail.read()
    (tmp_path / "new").write_text("one\nother\nthird\n")
    (tmp_path / "new").replace(path)
    assert read(tail) == (("one", "other", "third"), True)
    path.write_text("one\n")
    assert read(tail) == (("one",), True)
    path.write_text("two\nthree\n")  # longer, in the same inode, whose number a new file may get as well
    assert read(tail) == (("two", "three"), True)
    path.write_text("two\nTHREE\nfour\n")
    assert read(tail) == (("two", "THREE", "four"), True)
    path.unlink()
    assert read(tail) == ((), True)
    assert read(tail) == ((), False)
