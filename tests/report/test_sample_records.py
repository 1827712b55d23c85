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
from fovea.report.images import image_path, png_bytes, read_image, write_image
from fovea.report.samples import GroupSummary, drop_samples, index_line, indexed, read_step, sample_steps, write_samples
from fovea_gym.errors import DataError
from fovea_gym.types import Mark
from gym_tests.tables import table
from tests.records import said

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
    last: dict[str, Any] = {
        "messages": (failure, closer),
        "tokens": tokens,
        "version": 4,
        "reward": -0.5,
        "seconds": 1.25,
    }
    first = TokenTrace(pieces=("\\crop{1}",), engine_logprobs=(-1.0,))
    turns = (RecordedTurn(text="\\crop{1}", tokens=first), RecordedTurn(text="\\boxed{3}", **last))
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


def test_an_image_is_kept_once(tmp_path: Path) -> None:
    names = [write_image(tmp_path, picture(shade)) for shade in (10, 200, 10)]
    assert names[0] == names[2] != names[1]
    assert sorted(path.stem for path in (tmp_path / "samples" / "images").iterdir()) == sorted(set(names))
    assert read_image(tmp_path, names[0]) == picture(10)
    image_path(tmp_path, names[0]).unlink()
    assert read_image(tmp_path, names[0]) is None


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


def test_a_large_image_is_kept_small_and_a_small_one_keeps_its_pixels() -> None:
    with Image.open(io.BytesIO(png_bytes(Image.new("RGBA", (2000, 1000), (9, 8, 7, 255))))) as image:
        assert (image.size, image.getpixel((0, 0))) == ((768, 384), (9, 8, 7))
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    with Image.open(io.BytesIO(png_bytes(Image.fromarray(pixels)))) as image:
        assert np.array_equal(np.asarray(image), pixels)


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
