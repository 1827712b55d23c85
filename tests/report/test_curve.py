import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from fovea.report.panels import ACCURACY_COLOUR, REWARD_COLOUR, draw_curve, running_mean

STEPS = [{"step": float(step), "reward": 1 - 1 / step, "loss": 0.1} for step in range(1, 101)]
DEV = [row | {"accuracy/dev": row["reward"]} if row["step"] % 20 == 0 else row for row in STEPS]


def pixels_of_colour(path: Path, colour: str) -> int:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    return int((abs(pixels - ImageColor.getrgb(colour)).max(axis=-1) < 8).sum())


def test_running_mean_by_hand() -> None:
    values = np.array([1.0, 3.0, 5.0, 11.0])
    assert running_mean(values, 2).tolist() == [1.0, 2.0, 4.0, 8.0]
    assert running_mean(values, 1).tolist() == values.tolist()
    assert running_mean(values, 9).tolist() == [1.0, 2.0, 3.0, 5.0]


def test_running_mean_leaves_out_what_is_not_finite() -> None:
    means = running_mean(np.array([math.nan, 2.0, math.inf, 6.0]), 3)
    assert math.isnan(means[0])
    assert means[1:].tolist() == [2.0, 2.0, 4.0]


def test_dev_accuracy_gets_its_panel(tmp_path: Path) -> None:
    draw_curve(STEPS, tmp_path / "reward.png")
    draw_curve(DEV, tmp_path / "both.png")
    assert pixels_of_colour(tmp_path / "reward.png", REWARD_COLOUR) > 500
    assert pixels_of_colour(tmp_path / "reward.png", ACCURACY_COLOUR) == 0
    assert pixels_of_colour(tmp_path / "both.png", REWARD_COLOUR) > 500
    assert pixels_of_colour(tmp_path / "both.png", ACCURACY_COLOUR) > 500


@pytest.mark.parametrize("metrics", [[], STEPS[:1], [{"step": 1.0, "loss": 0.1}], [{"step": 1.0, "reward": math.nan}]])
def test_a_young_run_can_be_drawn(tmp_path: Path, metrics: list[dict[str, float]]) -> None:
    draw_curve(metrics, tmp_path / "curve.png")
    with Image.open(tmp_path / "curve.png") as image:
        assert image.size == (1024, 560), "the page and one panel"
        image.verify()


def test_a_single_step_is_seen(tmp_path: Path) -> None:
    draw_curve(STEPS[:1], tmp_path / "curve.png")
    assert pixels_of_colour(tmp_path / "curve.png", REWARD_COLOUR) > 20
