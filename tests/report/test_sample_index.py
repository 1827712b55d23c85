from __future__ import annotations

from pathlib import Path

from fovea.report.curves import SampleIndex
from fovea.report.samples import write_samples
from tests.report.folders import group, write_run

IMAGE = "0123456789abcdef"


def read(folder: Path) -> SampleIndex:
    index = SampleIndex(folder)
    index.refresh()
    return index


def entries(index: SampleIndex) -> list[tuple[int, int]]:
    """The steps of an index, each with the number of its groups."""
    return [(entry.step, len(entry.groups)) for entry in index.after(0)]


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recorded=(1, 2))
    index = read(folder)
    assert entries(index) == [(1, 2), (2, 2)]
    (folder / "samples" / "step-000002.jsonl").write_text("no record\n")
    write_samples(folder, 4, [group(IMAGE, 1, "x")])
    index.refresh()
    assert [entry.step for entry in index.after(2)] == [4], "step 2 is known, and is not read again"


def test_a_step_that_was_taken_again_has_a_later_entry_and_a_damaged_line_is_read_from_its_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recorded=(1, 2))
    write_samples(folder, 2, [group(IMAGE, 1, "y")])
    assert entries(read(folder)) == [(1, 2), (2, 2), (2, 1)]
    (folder / "samples" / "index.jsonl").write_text('{"step": 1}\n[]\nnot json\n')
    assert entries(read(folder))[0] == (1, 2)


def test_a_run_without_an_index_is_read_in_parts(tmp_path: Path) -> None:
    """A page must not wait until thousands of steps are read."""
    folder = write_run(tmp_path / "run", recorded=(1, 2, 3))
    (folder / "samples" / "index.jsonl").unlink()
    (folder / "samples" / "step-000002.jsonl").write_text("damaged\n")
    clock = iter(range(0, 1000))
    index = SampleIndex(folder, clock=lambda: float(next(clock)))
    index.refresh()
    assert entries(index) == [(1, 2)]
    for _ in range(3):
        index.refresh()
    assert entries(index) == [(1, 2), (2, 0), (3, 2)]
