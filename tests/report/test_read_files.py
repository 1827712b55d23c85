"""The files of a run as its page reads them: samples, their index, metrics, growing files, and marks in answers."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fovea.evaluation.records import AnsweredRow, RecordedImage, RecordedMessage, RecordedTurn, TokenTrace
from fovea.metrics.log import JsonlSink
from fovea.report.answers import MAX_MARKS, marks_in, step_json
from fovea.report.curves import MAX_POINTS, Curves, SampleIndex, Tail, downsampled
from fovea.report.images import image_path, png_bytes, read_image, write_image
from fovea.report.samples import GroupSummary, drop_samples, index_line, indexed, read_step, sample_steps, write_samples
from fovea_gym.errors import DataError
from fovea_gym.types import Mark
from gym_tests.tables import table
from tests.records import said
from tests.report.folders import group, write_run

FIRST, SECOND = "0123456789abcdef", "fedcba9876543210"


def picture(shade: int, side_px: int = 8) -> bytes:
    return png_bytes(Image.fromarray(np.full((side_px, side_px, 3), shade, np.uint8)))


def record(prompt: str = "How many?", **changes: object) -> AnsweredRow:
    closer = RecordedMessage(role="tool", tool="crop", parts=("Look closer.", RecordedImage(name=SECOND)))
    failure = RecordedMessage(role="tool", tool="corp", failed=True, parts=("There is no tool corp.",))
    tokens = TokenTrace(
        **{"pieces": ("\\boxed{", "3}"), "engine_logprobs": (-0.5, -0.25)},
        **{"trainer_logprobs": (-0.5, -0.26), "advantages": (0.7, 0.7)},
    )
    last: dict[str, Any] = {"messages": (failure, closer), "tokens": tokens, "version": 4}
    first = TokenTrace(pieces=("\\crop{1}",), engine_logprobs=(-1.0,))
    turns = (
        RecordedTurn(text="\\crop{1}", tokens=first),
        RecordedTurn(text="\\boxed{3}", reward=-0.5, seconds=1.25, **last),
    )
    mark = Mark(image=1, xy=(0.1, 0.2, 0.5, 0.6), label="truth")
    scored: dict[str, Any] = {"reward": 1.0, "accuracy": 1.0, "parts": {"match": 1.0, "format": 0.5}}
    shown = (RecordedImage(name=FIRST, frame=(1000, 1000)), RecordedImage(name=SECOND), prompt)
    played = said("", **scored, image_parts=({"seen": 1.0}, {}), turns=turns, marks=(mark,), end="max_turns")
    fields: dict[str, Any] = {
        **{"id": "train/7", "question": prompt, "truth": "3", "kind": "count"},
        "messages": (RecordedMessage(role="user", parts=shown),),
        "answers": (played, said("", reward=-0.5, finish="length")),
    }
    return AnsweredRow(**(fields | changes))


def test_records_read_back_as_written(tmp_path: Path) -> None:
    assert sample_steps(tmp_path) == [], "a young run has none"
    plain = RecordedMessage(role="user", parts=("How many?",))
    early, late = (record(), record("Which colour?")), (record(messages=(plain,)),)
    write_samples(tmp_path, 1200, late)
    write_samples(tmp_path, 50, early)
    assert sample_steps(tmp_path) == [50, 1200]
    assert (read_step(tmp_path, 50), read_step(tmp_path, 1200)) == (early, late)
    # a step written again replaces the old
    write_samples(tmp_path, 50, [record("new")])
    assert read_step(tmp_path, 50) == (record("new"),)


def test_an_image_is_kept_once_small_and_with_its_pixels(tmp_path: Path) -> None:
    names = [write_image(tmp_path, picture(shade)) for shade in (10, 200, 10)]
    assert names[0] == names[2] != names[1]
    assert sorted(path.stem for path in (tmp_path / "samples" / "images").iterdir()) == sorted(set(names))
    assert read_image(tmp_path, names[0]) == picture(10)
    image_path(tmp_path, names[0]).unlink()
    assert read_image(tmp_path, names[0]) is None
    with Image.open(io.BytesIO(png_bytes(Image.new("RGBA", (2000, 1000), (9, 8, 7, 255))))) as image:
        assert (image.size, image.getpixel((0, 0))) == ((768, 384), (9, 8, 7))
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    with Image.open(io.BytesIO(png_bytes(Image.fromarray(pixels)))) as image:
        assert np.array_equal(np.asarray(image), pixels)


@table("text", ["line\nbreak", "u\u2028v\u0085w", "\ud800 half a pair", "数 \x00 😀", '"}\n{"'])
def test_any_text_reads_back(tmp_path: Path, text: str) -> None:
    odd = record(text, truth=text, kind=text, id=text, answers=(said(text),))
    write_samples(tmp_path, 1, [odd, record()])
    assert read_step(tmp_path, 1) == (odd, record())


def test_a_reward_that_is_not_finite_is_still_valid_json(tmp_path: Path) -> None:
    answer = said("x", reward=math.nan, parts={"match": math.inf})
    write_samples(tmp_path, 1, [record(answers=(answer,))])

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not a JSON")

    json.loads((tmp_path / "samples" / "step-000001.jsonl").read_text(), parse_constant=refuse)
    (back,) = read_step(tmp_path, 1)[0].answers
    assert (math.isnan(back.reward), math.isnan(back.parts["match"])) == (True, True)


@table(
    ("old", "new", "problem"),
    [
        (FIRST, "../../secret", r"step-000001\.jsonl does not hold sample records \(.*'\.\./\.\./secret'"),
        ("[-0.5, -0.26]", "[-0.5]", "2 tokens have 2 engine log-probs, 1 trainer"),
    ],
)
def test_a_name_that_leads_out_and_values_of_another_length_are_refused(
    old: str, new: str, problem: str, tmp_path: Path
) -> None:
    write_samples(tmp_path, 1, [record()])
    path = tmp_path / "samples" / "step-000001.jsonl"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataError, match=problem):
        read_step(tmp_path, 1)


def test_later_steps_are_dropped_with_their_entries_and_what_was_cut_off(tmp_path: Path) -> None:
    drop_samples(tmp_path, after=3)
    for step in (1, 3, 5):
        write_samples(tmp_path, step, [record()])
    index = tmp_path / "samples" / "index.jsonl"
    whole = index.read_text().splitlines(keepends=True)
    index.write_text("".join(whole) + whole[0][:20])
    drop_samples(tmp_path, after=3)
    assert sample_steps(tmp_path) == [1, 3]
    assert index.read_text() == "".join(whole[:2])


def test_the_index_has_a_summary_of_every_group(tmp_path: Path) -> None:
    write_samples(tmp_path, 50, [record(), record("Which?")])
    (line,) = (tmp_path / "samples" / "index.jsonl").read_text().splitlines()
    entry = index_line(line)
    assert (entry.step, entry) == (50, indexed(50, [record(), record("Which?")]))
    first, second = entry.groups
    assert first == GroupSummary(kind="count", row=first.row, rewards=(1.0, -0.5), num_truncated=2)
    assert first.row != second.row
    assert first.row == indexed(60, [record(answers=())]).groups[0].row, "the same row in another step"


@table("content", ["no json\n", "{}\n", "[]\n"])
def test_a_foreign_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "samples").mkdir(exist_ok=True)
    (tmp_path / "samples" / "step-000001.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"step-000001\.jsonl does not hold sample records"):
        read_step(tmp_path, 1)


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


def test_a_short_curve_is_kept_as_it_is_and_points_of_a_long_one_are_means_with_their_range() -> None:
    curve = downsampled(np.array([1.0, 2.0, 3.0]), np.array([0.5, math.nan, 0.25]), 10)
    assert curve.steps_B.tolist() == [1.0, 3.0], "a value that is not finite has no place on a curve"
    assert curve.means_B.tolist() == curve.lows_B.tolist() == [0.5, 0.25]
    curve = downsampled(np.arange(1.0, 8.0), np.array([1.0, 3.0, 2.0, 4.0, 9.0, 0.0, 5.0]), 3)
    assert curve.steps_B.tolist() == [1.5, 3.5, 6.0], "two, two and three steps"
    assert curve.means_B.tolist() == pytest.approx([2.0, 3.0, 14 / 3])
    assert (curve.lows_B.tolist(), curve.highs_B.tolist()) == ([1.0, 2.0, 0.0], [3.0, 4.0, 9.0])
    values = np.random.default_rng(0).normal(size=MAX_POINTS * 8)
    curve = downsampled(np.arange(len(values)) + 1.0, values, MAX_POINTS)
    assert (len(curve.means_B), curve.means_B.mean()) == (MAX_POINTS, pytest.approx(values.mean()))
    assert (curve.lows_B.min(), curve.highs_B.max()) == (values.min(), values.max())


def test_curves_grow_with_their_file(tmp_path: Path) -> None:
    sink, curves = JsonlSink(tmp_path), Curves(tmp_path)
    curves.refresh()
    assert (curves.names, curves.last_step) == ([], 0)
    for step in (1, 2):
        sink.write(step, {"reward": step / 2} | ({"accuracy/dev": 0.5} if step == 2 else {}))
        curves.refresh()
    assert curves.names == ["reward", "accuracy/dev"]
    assert curves.curve("reward").means_B.tolist() == [0.5, 1.0]
    assert curves.curve("accuracy/dev").steps_B.tolist() == [2.0]


def test_a_resumed_run_drops_what_it_takes_again(tmp_path: Path) -> None:
    sink, curves = JsonlSink(tmp_path), Curves(tmp_path)
    for step in (1, 2, 3):
        sink.write(step, {"reward": float(step)})
    curves.refresh()
    JsonlSink(tmp_path, resume_step=1).write(2, {"reward": 7.0})
    curves.refresh()
    assert (curves.curve("reward").means_B.tolist(), curves.last_step) == ([1.0, 7.0], 2)
    (tmp_path / "metrics.jsonl").write_text("oops\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl line 1 is 'oops'"):
        Curves(tmp_path).refresh()


def read_new(tail: Tail) -> tuple[tuple[str, ...], bool]:
    appended = tail.read()
    return appended.lines, appended.begun_anew


def test_every_line_is_read_once_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert read_new(tail) == ((), False), "there is no file yet"
    path.write_text("one\ntw")
    assert read_new(tail) == (("one",), False)
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert read_new(tail) == (("two", "three"), False)
    assert read_new(tail) == ((), False)
    (tmp_path / "log").write_text("a\u2028b\nc\r\n", encoding="utf-8", newline="")
    assert read_new(Tail(tmp_path / "log"))[0] == ("a\u2028b", "c\r"), "a line separator inside a line does not cut it"


def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\n")
    tail = Tail(path)
    tail.read()
    (tmp_path / "new").write_text("one\nother\nthird\n")
    (tmp_path / "new").replace(path)
    assert read_new(tail) == (("one", "other", "third"), True)
    path.write_text("one\n")
    assert read_new(tail) == (("one",), True)
    path.write_text("two\nthree\n")  # longer, in the same inode, whose number a new file may get as well
    assert read_new(tail) == (("two", "three"), True)
    path.write_text("two\nTHREE\nfour\n")
    assert read_new(tail) == (("two", "THREE", "four"), True)
    path.unlink()
    assert read_new(tail) == ((), True)
    assert read_new(tail) == ((), False)


THOUSANDTHS = RecordedImage(name="0123456789abcdef", frame=(1000, 1000))
PIXELS = RecordedImage(name="0123456789abcdef", frame=(280, 140))


@table(
    ("text", "image", "marks"),
    [
        ("The cat is at (100,200),(500,600).", THOUSANDTHS, [((0.1, 0.2, 0.5, 0.6), "")]),
        ('[{"bbox_2d": [28, 14, 140, 70], "label": "cat"}]', PIXELS, [((0.1, 0.1, 0.5, 0.5), "cat")]),
        ('{"label": "eye", "point_2d": [70.0, 35]}', PIXELS, [((0.25, 0.25), "eye")]),
        (
            '[{"point_2d": [0, 0], "label": "a"}, {"point_2d": [1000, 500]}]',
            THOUSANDTHS,
            [((0, 0), "a"), ((1, 0.5), "")],
        ),
        ("f(2, 3) and the interval (1, 2)", THOUSANDTHS, []),
        ('{"bbox_2d": [1, 2, 3]}', THOUSANDTHS, []),
    ],
)
def test_forms_that_models_were_taught(text: str, image: RecordedImage, marks: list[Any]) -> None:
    assert marks_in(text, image, 3) == tuple(Mark(image=3, xy=pytest.approx(xy), label=label) for xy, label in marks)


def test_nothing_is_guessed_where_the_frame_is_not_known_and_a_flood_is_bounded() -> None:
    assert marks_in("(100,200),(500,600)", RecordedImage(name="0123456789abcdef"), 1) == ()
    assert marks_in("(100,200),(500,600)", None, 0) == ()
    assert len(marks_in("(1,2),(3,4) " * 100_000, THOUSANDTHS, 1)) == MAX_MARKS


def test_an_answer_that_the_environment_has_marked_is_not_read_again() -> None:
    """Its coordinates may be of another frame than the model's family has."""

    def marks(*given: Mark) -> list[str]:
        asked = {"id": "train/7", "question": "Where?", "truth": "", "kind": "box"}
        prompt = RecordedMessage(role="user", parts=(THOUSANDTHS, "Where?"))
        answer = said("(100,200),(500,600)", reward=1.0, accuracy=1.0, marks=given)
        record = AnsweredRow(**asked, messages=(prompt,), answers=(answer,))
        (group,) = step_json(1, [record])["groups"]
        return [mark["label"] for mark in group["answers"][0]["marks"]]

    truth, read = (Mark(image=1, xy=(0.1, 0.2, 0.5, 0.6), label=label) for label in ("truth", "answer"))
    assert marks() == [""]
    assert marks(truth) == ["truth", ""]
    assert marks(truth, read) == ["truth", "answer"]
