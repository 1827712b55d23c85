from pathlib import Path

from fovea.report.curves import SampleIndex
from fovea.report.samples import write_samples
from tests.report.folders import group, write_run

IMAGE = "0123456789abcdef"


def steps(index: SampleIndex, after: int = 0) -> list[int]:
    return [entry.step for entry in index.after(after)]


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recorded=(1, 2))
    index = SampleIndex(folder)
    index.refresh()
    assert steps(index) == [1, 2]
    (folder / "samples" / "step-000002.jsonl").write_text("no record\n")
    write_samples(folder, 4, [group(IMAGE, 1, "x")])
    index.refresh()
    assert steps(index, after=2) == [4], "step 2 is known, and is not read again"


def test_a_step_that_was_taken_again_has_a_later_entry(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recorded=(1, 2))
    write_samples(folder, 2, [group(IMAGE, 1, "y")])
    index = SampleIndex(folder)
    index.refresh()
    assert [(entry.step, len(entry.groups)) for entry in index.after(0)] == [(1, 2), (2, 2), (2, 1)]


def test_a_run_without_an_index_is_read_in_parts(tmp_path: Path) -> None:
    """A page must not wait until thousands of steps are read."""
    folder = write_run(tmp_path / "run", recorded=(1, 2, 3))
    (folder / "samples" / "index.jsonl").unlink()
    (folder / "samples" / "step-000002.jsonl").write_text("damaged\n")
    clock = iter(range(0, 1000))
    index = SampleIndex(folder, clock=lambda: float(next(clock)))
    index.refresh()
    assert steps(index) == [1]
    for _ in range(3):
        index.refresh()
    assert [(entry.step, len(entry.groups)) for entry in index.after(0)] == [(1, 2), (2, 0), (3, 2)]


def test_a_damaged_line_of_the_index_is_read_from_its_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recorded=(1,))
    (folder / "samples" / "index.jsonl").write_text('{"step": 1}\n[]\nnot json\n')
    index = SampleIndex(folder)
    index.refresh()
    assert [(entry.step, len(entry.groups)) for entry in index.after(0)] == [(1, 2)]
