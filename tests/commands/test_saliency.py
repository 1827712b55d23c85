"""`fovea saliency`: falls of an answer's log-prob equal those by transformers, and wrong words are one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.commands.saliency import Asked, saliency_of
from fovea.config.environments import ShapesEnvironment
from fovea.config.recipes import shipped_recipes
from fovea.environments.shapes.environment import Shapes
from fovea.evaluation.occlusion import OcclusionMap
from fovea.types import ImageRef
from tests.reference import reference_logprobs
from tests.tiny_models import renderer, save, tiny

SIDE = 20
"""Of patches: those at the right and lower edge of 48 px are cut."""
ANSWER = "It is red."


@pytest.mark.parametrize("row_tokens", [16_384, 150, 1])
def test_falls_are_those_of_transformers(row_tokens: int, tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    save(parts, tmp_path)
    asked = Asked(row=2, patch_px=SIDE, answer=ANSWER)
    words, recipe = [f"train.max_tokens_per_microbatch={row_tokens}"], shipped_recipes()["shapes"]
    found = saliency_of(str(tmp_path), asked, words, print, recipe=recipe, split="test").map
    environment = Shapes(ShapesEnvironment(), seed=0)
    task = environment.tasks("test")[2]
    (message,) = environment.prompt(task)
    pixels = task.images[0].source
    assert isinstance(pixels, np.ndarray)
    answer_T = np.array(parts.processor.tokenizer(ANSWER, add_special_tokens=False)["input_ids"])

    def logprob(shown: np.ndarray) -> float:
        seen = [ImageRef(source=shown) if isinstance(part, ImageRef) else part for part in message.parts]
        prompt = renderer(parts).prompt([replace(message, parts=tuple(seen))])
        return float(reference_logprobs(parts, prompt, answer_T).sum().detach())

    whole = logprob(pixels)
    assert found.logprob == pytest.approx(whole, abs=1e-4)
    assert found.falls_RC.shape == (3, 3)
    for row, column in np.ndindex(3, 3):
        hidden = pixels.copy()
        hidden[SIDE * row : SIDE * (row + 1), SIDE * column : SIDE * (column + 1)] = pixels.mean((0, 1)).round()
        assert found.falls_RC[row, column] == pytest.approx(whole - logprob(hidden), abs=1e-4)
    assert np.abs(found.falls_RC).max() > 1e-3, "a tiny model reads its picture"


def test_the_command_writes_the_picture_and_the_numbers(tmp_path: Path) -> None:
    save(tiny("qwen3_vl"), tmp_path / "model")
    out = tmp_path / "maps" / "map.png"
    words = ["saliency", str(tmp_path / "model"), "--recipe", "shapes", "--patch-px", "24", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == str(out)
    numbers = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert (numbers["id"], np.shape(numbers["falls"]), numbers["patch_px"]) == ("test/0", (2, 2), 24)
    assert Image.open(out).size == (48, 48)


def test_the_picture_is_lit_where_the_log_prob_falls_most() -> None:
    found = OcclusionMap(logprob=-1.0, falls_RC=np.array([[0.0, 2.0], [-5.0, 1.0]], np.float32), side_px=4)
    shown_YXC = np.asarray(found.over(Image.new("RGB", (7, 8), (200, 100, 0))))
    assert shown_YXC.shape == (8, 7, 3)
    assert shown_YXC[0, 0].tolist() == shown_YXC[4, 0].tolist() == [30, 30, 30]
    assert shown_YXC[0, 4].tolist() == [200, 100, 0]
    assert 30 < shown_YXC[4, 4, 0] < 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["majority"], "majority has no picture to hide parts of here; name a run"),
        (["MODEL", "--row", "5000"], "--row 5000: the test split has rows 0 to"),
        (["MODEL", "--image", "2"], "--image 2: the prompt of test/0 has 1 picture(s)"),
        (["MODEL", "--patch-px", "1"], "has 2304 patches, above the limit of 1024; set a larger one"),
        (["MODEL", "--answer", ""], "--answer: it has no token"),
        (["MODEL", "OTHER"], "OTHER: fovea saliency takes one model"),
        (["MODEL", "--out", "map.jpg"], "--out map.jpg: the file is a PNG picture; name it map.png"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    save(tiny("qwen3_vl"), tmp_path)
    named = [str(tmp_path) if word == "MODEL" else word for word in words]
    done = CliRunner().invoke(app, ["saliency", *named, "--recipe", "shapes"])
    assert done.exit_code == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
