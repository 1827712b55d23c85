import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fovea.evaluation.records import (
    AnsweredRow,
    RecordedImage,
    RecordedMessage,
    RecordedTurn,
    TokenTrace,
)
from fovea.report.images import image_path, png_bytes, read_image, write_image
from fovea.report.samples import GroupSummary, drop_samples, index_line, indexed, read_step, sample_steps, write_samples
from fovea_gym.errors import DataError
from fovea_gym.types import Mark
from tests.records import said

FIRST, SECOND = "0123456789abcdef", "fedcba9876543210"


def picture(shade: int, side_px: int = 8) -> bytes:
    return png_bytes(Image.fromarray(np.full((side_px, side_px, 3), shade, np.uint8)))


def prompt_of(question: str, *images: RecordedImage) -> tuple[RecordedMessage, ...]:
    return (RecordedMessage(role="user", parts=(*images, question)),)


def record(prompt: str = "How many?", **changes: object) -> AnsweredRow:
    closer = RecordedMessage(role="tool", tool="crop", parts=("Look closer.", RecordedImage(name=SECOND)))
    failure = RecordedMessage(role="tool", tool="corp", failed=True, parts=("There is no tool corp.",))
    tokens = TokenTrace(
        pieces=("\\boxed{", "3}"),
        engine_logprobs=(-0.5, -0.25),
        trainer_logprobs=(-0.5, -0.26),
        advantages=(0.7, 0.7),
    )
    turns = (
        RecordedTurn(text="\\crop{1}", tokens=TokenTrace(pieces=("\\crop{1}",), engine_logprobs=(-1.0,))),
        RecordedTurn(
            messages=(failure, closer), text="\\boxed{3}", tokens=tokens, version=4, reward=-0.5, seconds=1.25
        ),
    )
    mark = Mark(image=1, xy=(0.1, 0.2, 0.5, 0.6), label="truth")
    fields = {
        "id": "train/7",
        "question": prompt,
        "truth": "3",
        "kind": "count",
        "messages": prompt_of(prompt, RecordedImage(name=FIRST, frame=(1000, 1000)), RecordedImage(name=SECOND)),
        "answers": (
            said(
                "",
                reward=1.0,
                accuracy=1.0,
                parts={"match": 1.0, "format": 0.5},
                image_parts=({"seen": 1.0}, {}),
                turns=turns,
                marks=(mark,),
                end="max_turns",
            ),
            said("", reward=-0.5, finish="length"),
        ),
    }
    return AnsweredRow(**(fields | changes))


def test_records_read_back_as_written(tmp_path: Path) -> None:
    early, late = (record(), record("Which colour?")), (record(messages=prompt_of("How many?")),)
    write_samples(tmp_path, 1200, late)
    write_samples(tmp_path, 50, early)
    assert sample_steps(tmp_path) == [50, 1200]
    assert (read_step(tmp_path, 50), read_step(tmp_path, 1200)) == (early, late)


def test_a_young_run_has_none(tmp_path: Path) -> None:
    assert sample_steps(tmp_path) == []


def test_an_image_is_kept_once(tmp_path: Path) -> None:
    names = [write_image(tmp_path, picture(shade)) for shade in (10, 200, 10)]
    assert names[0] == names[2] != names[1]
    assert sorted(path.stem for path in (tmp_path / "samples" / "images").iterdir()) == sorted(set(names))
    assert read_image(tmp_path, names[0]) == picture(10)
    image_path(tmp_path, names[0]).unlink()
    assert read_image(tmp_path, names[0]) is None


def test_a_step_written_again_replaces_the_old(tmp_path: Path) -> None:
    write_samples(tmp_path, 50, [record("old"), record("older")])
    write_samples(tmp_path, 50, [record("new")])
    assert read_step(tmp_path, 50) == (record("new"),)


@pytest.mark.parametrize("text", ["line\nbreak", "u\u2028v\u0085w", "\ud800 half a pair", "数 \x00 😀", '"}\n{"'])
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
    assert math.isnan(back.reward)
    assert math.isnan(back.parts["match"])


def test_a_large_image_is_kept_small() -> None:
    with Image.open(io.BytesIO(png_bytes(Image.new("RGBA", (2000, 1000), (9, 8, 7, 255))))) as image:
        assert image.size == (768, 384)
        assert image.getpixel((0, 0)) == (9, 8, 7)


def test_a_small_image_keeps_its_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    with Image.open(io.BytesIO(png_bytes(Image.fromarray(pixels)))) as image:
        assert np.array_equal(np.asarray(image), pixels)


def test_an_image_name_cannot_lead_out_of_the_run_folder(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [record()])
    path = tmp_path / "samples" / "step-000001.jsonl"
    path.write_text(path.read_text().replace(FIRST, "../../secret"))
    with pytest.raises(DataError, match=r"step-000001\.jsonl does not hold sample records \(.*'\.\./\.\./secret'"):
        read_step(tmp_path, 1)


def test_per_token_values_of_another_length_are_refused(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [record()])
    path = tmp_path / "samples" / "step-000001.jsonl"
    path.write_text(path.read_text().replace("[-0.5, -0.26]", "[-0.5]"))
    with pytest.raises(DataError, match="2 tokens have 2 engine log-probs, 1 trainer"):
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
    assert entry.step == 50
    assert entry == indexed(50, [record(), record("Which?")])
    first, second = entry.groups
    assert first == GroupSummary(kind="count", row=first.row, rewards=(1.0, -0.5), num_truncated=2)
    assert first.row != second.row
    assert first.row == indexed(60, [record(answers=())]).groups[0].row, "the same row in another step"


@pytest.mark.parametrize("content", ["no json\n", "{}\n", "[]\n"])
def test_a_foreign_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step-000001.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"step-000001\.jsonl does not hold sample records"):
        read_step(tmp_path, 1)
