import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fovea.errors import DataError
from fovea.evaluation.answer import SampledAnswer
from fovea.report.samples import SampleRecord, png_bytes, read_samples, sample_steps, write_samples


def picture(shade: int, side_px: int = 8) -> bytes:
    return png_bytes(Image.fromarray(np.full((side_px, side_px, 3), shade, np.uint8)))


def record(prompt: str = "How many?", **changes: object) -> SampleRecord:
    fields = {
        "prompt": prompt,
        "truth": "3",
        "kind": "count",
        "images": (picture(10), picture(200)),
        "answers": (
            SampledAnswer(
                text="\\boxed{3}",
                reward=1.0,
                accuracy=1.0,
                parts={"match": 1.0, "format": 0.5},
                image_parts=({"seen": 1.0}, {}),
            ),
            SampledAnswer(text="", reward=-0.5, accuracy=0.0, finish="length"),
        ),
    }
    return SampleRecord(**(fields | changes))


def test_records_read_back_as_written(tmp_path: Path) -> None:
    early, late = (record(), record("Which colour?")), (record(images=()),)
    write_samples(tmp_path, 1200, late)
    write_samples(tmp_path, 50, early)
    assert sample_steps(tmp_path) == [50, 1200]
    assert read_samples(tmp_path) == {50: early, 1200: late}
    assert list(read_samples(tmp_path)) == [50, 1200]
    assert read_samples(tmp_path, [1200]) == {1200: late}


def test_a_young_run_has_none(tmp_path: Path) -> None:
    assert read_samples(tmp_path) == {}


def test_an_image_is_kept_once(tmp_path: Path) -> None:
    for step in (1, 2):
        write_samples(tmp_path, step, [record(), record()])
    paths = sorted(path.relative_to(tmp_path).parts for path in tmp_path.rglob("*") if path.is_file())
    assert [parts[:2] for parts in paths] == [
        *[("samples", "images")] * 2,
        ("samples", "step-000001.jsonl"),
        ("samples", "step-000002.jsonl"),
    ]


def test_a_step_written_again_replaces_the_old(tmp_path: Path) -> None:
    write_samples(tmp_path, 50, [record("old"), record("older")])
    write_samples(tmp_path, 50, [record("new")])
    assert read_samples(tmp_path) == {50: (record("new"),)}


@pytest.mark.parametrize("text", ["line\nbreak", "u\u2028v\u0085w", "\ud800 half a pair", "数 \x00 😀", '"}\n{"'])
def test_any_text_reads_back(tmp_path: Path, text: str) -> None:
    odd = record(text, truth=text, kind=text, answers=(SampledAnswer(text=text, reward=1, accuracy=1),))
    write_samples(tmp_path, 1, [odd, record()])
    assert read_samples(tmp_path)[1] == (odd, record())


def test_a_reward_that_is_not_finite_is_still_valid_json(tmp_path: Path) -> None:
    answer = SampledAnswer(text="x", reward=math.nan, accuracy=0.0, parts={"match": math.inf})
    write_samples(tmp_path, 1, [record(answers=(answer,))])

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    json.loads((tmp_path / "samples" / "step-000001.jsonl").read_text(), parse_constant=refuse)
    (back,) = read_samples(tmp_path)[1][0].answers
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
    (tmp_path / "secret.png").write_bytes(b"secret")
    write_samples(tmp_path, 1, [record(images=(picture(10),))])
    path = tmp_path / "samples" / "step-000001.jsonl"
    row = json.loads(path.read_text()) | {"images": ["../../secret"]}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"step-000001\.jsonl holds no sample records \(.*'\.\./\.\./secret'"):
        read_samples(tmp_path)


@pytest.mark.parametrize("content", ["no json\n", "{}\n", "[]\n"])
def test_a_foreign_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step-000001.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"step-000001\.jsonl holds no sample records"):
        read_samples(tmp_path)
