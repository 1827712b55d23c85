"""The environment `grounding`: published layouts, coordinates of models, bad rows, `fovea grade`, a run's wiring."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fovea.config.loading import load_config
from fovea.evaluation.controls import with_shuffled_images
from fovea.types import PromptImage
from fovea.wiring.environment import make_environment
from fovea.wiring.given import rows_as_files
from fovea_gym.commands.grade import grade_file
from fovea_gym.environments.grounding.coordinates import frame_of, in_frame
from fovea_gym.environments.grounding.environment import Grounding
from fovea_gym.environments.grounding.grade import in_shares
from fovea_gym.errors import BadRowError, ConfigError, DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.settings.grounding import Coordinates
from fovea_gym.types import ImageRef, Score, Task
from gym_tests.grading import scored
from gym_tests.tables import table
from tests.environments.grounding.layouts import (
    grounding,
    gui_r1,
    lines,
    picture,
    pictures,
    screenspot,
    settings_of,
    vlm_r1,
    vlm_r1_conversations,
)

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
HALF = 0.5 + 1e-9
"""Pixels of the resized picture by which a written box may be off."""


def score(environment: Grounding, task: Task, text: str) -> Score:
    return scored(environment.graders, task, text)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", [vlm_r1, vlm_r1_conversations, screenspot, gui_r1])
def test_a_published_layout_is_read_as_it_is(layout: Callable[[Path], Path], family: str, tmp_path: Path) -> None:
    named = layout.__name__ if layout in (screenspot, gui_r1) else "rows"
    environment = grounding(layout(tmp_path), family, layout=named)
    for task in environment.tasks("test"):
        assert environment.prompt(task)
        result = score(environment, task, environment.target(task))
        assert result.accuracy == 1
        assert result.reward > 0.95
        assert result.parts["format"] == 1
        assert score(environment, task, "I do not see it").reward == 0


def test_boxes_of_vlm_r1_in_the_coordinates_of_each_family(tmp_path: Path) -> None:
    environment = grounding(vlm_r1(tmp_path))
    task = environment.tasks("test")[0]
    assert (task.question, task.answer) == ("the lady in blue", "[[40, 20, 240, 120]]")
    assert environment.target(task) == '{"bbox_2d": [100, 100, 600, 600]}'
    assert score(environment, task, environment.target(task)).marks[0].xy == pytest.approx((0.1, 0.1, 0.6, 0.6))
    # a processor of Qwen2.5-VL that halves the sides, from 400 x 200 to 192 x 96
    file = vlm_r1(tmp_path)
    environment = Grounding(settings_of(file), RowAccess(), pictures("qwen2_5_vl", max_pixels=19_000))
    task = environment.tasks("test")[0]
    assert environment.target(task) == '{"bbox_2d": [19, 10, 115, 58]}'
    assert [score(environment, task, text).accuracy for text in ("[19, 10, 115, 58]", "[100, 100, 600, 600]")] == [1, 0]


def test_screenspot_is_clicked(tmp_path: Path) -> None:
    environment = grounding(screenspot(tmp_path), layout="screenspot")
    task = environment.tasks("test")[0]
    assert (task.kind, task.answer) == ("icon", "[[40, 20, 240, 120]]")
    assert "open the settings" in str(environment.prompt(task)[0].parts[-1])
    assert environment.target(task) == '{"point_2d": [350, 350]}'
    assert score(environment, task, "<point>101 101</point>").reward == 1
    assert score(environment, task, "<point>99 101</point>").accuracy == 0


def test_actions_of_gui_r1(tmp_path: Path) -> None:
    environment = grounding(gui_r1(tmp_path), layout="gui_r1")
    click, near, type_, home = environment.tasks("test")
    assert environment.target(click) == "[{'action': 'click', 'point': [350, 350], 'input_text': 'no input text'}]"
    assert score(environment, click, environment.target(click).replace("click", "scroll")).accuracy == 0
    assert score(environment, click, environment.target(click).replace("350, 350", "50, 350")).accuracy == 0
    assert score(environment, near, environment.target(near).replace("500, 500", "600, 590")).accuracy == 1
    typed = "<answer>[{'action': 'type', 'point': [-100, -100], 'input_text': '%s'}]</answer>"
    assert score(environment, type_, typed % "Shanghai").accuracy == 1
    assert score(environment, type_, typed % "a restaurant in Shanghai near me").accuracy == 0
    assert score(environment, type_, typed % "Shanghai").parts["text"] == pytest.approx(2 / 3)
    assert score(environment, home, "[{'action': 'press_home'}]").reward == 1
    assert "opened the app" in str(environment.prompt(home)[0].parts[-1])


def test_several_boxes_in_the_forms_of_cells(tmp_path: Path) -> None:
    name = picture(tmp_path)
    cells: list[object] = [
        [[40, 20, 200, 100], [0, 0, 20, 20]],
        [{"bbox": [40, 20, 200, 100], "label": "dog"}, {"bbox": [0, 0, 20, 20], "label": "cat"}],
        '```json\n[{"bbox_2d": [40, 20, 200, 100]}, {"bbox_2d": [0, 0, 20, 20]}]\n```',
        {"bbox": [[40, 20, 200, 100], [0, 0, 20, 20]]},
    ]
    solutions = [json.dumps(cells[0]), cells[2], "[]"]
    rows = [{"image": name, "problem": "dogs", "solution": solution} for solution in solutions]
    tasks = grounding(lines(tmp_path, rows), ask="boxes", box_form="xywh").tasks("test")
    assert [task.answer for task in tasks] == ["[[40, 20, 240, 120], [0, 0, 20, 20]]"] * 2 + ["[]"]
    for place, cell in enumerate(cells):
        file = lines(tmp_path, [{"image": name, "problem": "dogs", "solution": cell}], f"{place}.jsonl")
        environment = grounding(file, ask="boxes", box_form="xywh")
        task = environment.tasks("test")[0]
        assert task.answer == tasks[0].answer
        assert score(environment, task, environment.target(task)).accuracy == 1


@table(
    ("solution", "settings", "reason"),
    [
        ([1, 2, 3], {}, "answer_kind"),
        ("the dog", {}, "answer_kind"),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], {}, "answer_kind"),
        ([1, 2], {}, "answer_kind"),
        (True, {}, "answer_kind"),
        (json.loads("[" * 700 + "1" + "]" * 700), {}, "answer_kind"),
        (None, {}, "answer_missing"),
        ([30, 20, 10, 40], {}, "answer_never_right"),
        ([500, 20, 600, 40], {}, "answer_never_right"),
        ([500, 20], {"ask": "point"}, "answer_never_right"),
    ],
)
def test_bad_rows(solution: object, settings: dict[str, object], reason: str, tmp_path: Path) -> None:
    rows = [{"image": picture(tmp_path), "problem": "x", "solution": solution}]
    environment = grounding(lines(tmp_path, rows), **settings)
    with pytest.raises(BadRowError) as raised:
        environment.prompt(environment.tasks("test")[0])
    assert raised.value.reason == reason


@pytest.mark.parametrize("coordinates", ["model", "pixels", "thousandths", "unit", "original"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [(640, 480), (480, 640), (333, 500), (97, 64), (960, 540)])
def test_a_box_returns_from_the_coordinates_of_a_model(size: Any, family: str, coordinates: Coordinates) -> None:
    """Within half a pixel of the resized picture, whose sides are below 1000."""
    seen_by, ref = pictures(family), ImageRef(source=np.zeros((size[1], size[0], 3), np.uint8))
    frame, seen = frame_of(coordinates, ref, seen_by), seen_by.seen(ref)
    rng = np.random.default_rng(0)
    for _ in range(1000):
        left, top = int(rng.integers(0, size[0] - 8)), int(rng.integers(0, size[1] - 8))
        box = (left, top, int(rng.integers(left + 4, size[0] + 1)), int(rng.integers(top + 4, size[1] + 1)))
        shares = in_shares(box, (float(size[0]), float(size[1])))
        back = in_shares(in_frame(shares, frame), frame)
        off = [abs(a - b) * seen[axis % 2] for axis, (a, b) in enumerate(zip(shares, back, strict=True))]
        assert max(off) <= HALF, (box, back)


def test_the_frame_is_that_of_the_family_and_of_the_setting_and_sizes_are_those_shown(tmp_path: Path) -> None:
    ref = ImageRef(source=np.zeros((97, 131, 3), np.uint8))
    assert [frame_of("model", ref, pictures(family)) for family in FAMILIES] == [(128, 96), (1000, 1000)]
    seen_by = pictures()
    frames = [frame_of(each, ref, seen_by) for each in ("pixels", "thousandths", "unit", "original")]
    assert frames == [(128, 96), (1000, 1000), (1, 1), (131, 97)]
    assert in_frame((0.12345, 0.5, 0.12346, 0.75), (1, 1)) == (0.1235, 0.5, 0.1236, 0.75)
    assert in_frame((0.5, 0.5, 0.5001, 0.5001), (1000, 1000)) == (500, 500, 501, 501)
    # a photo that is shown turned
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "turned.jpg", exif=exif)
    assert pictures().stored(ImageRef(source=str(tmp_path / "turned.jpg"))) == (20, 40)


def test_the_truth_of_a_control_is_that_of_its_own_picture(tmp_path: Path) -> None:
    """Evaluation shows another row's picture, which may be smaller than the true box's place."""
    rows = [
        {"image": picture(tmp_path, name, (w, h)), "problem": "x", "solution": [w * 0.6, 0, w, h]}
        for name, w, h in (("wide.png", 400, 200), ("small.png", 100, 50))
    ]
    environment = grounding(lines(tmp_path, rows))
    for task in with_shuffled_images(environment.tasks("test")):
        assert environment.prompt(task)
        assert score(environment, task, "[600, 0, 1000, 1000]").reward == pytest.approx(1)


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match="choose iou or giou or hit"):
        settings_of(file, reward_kind="f1")
    with pytest.raises(ValueError, match="reward_kind=iou"):
        settings_of(file, reward_kind="giou", min_iou=0.5)
    with pytest.raises(ValueError, match="ask=point"):
        settings_of(file, layout="gui_r1", ask="box")
    with pytest.raises(ValueError, match="action_key"):
        settings_of(file, text_key="text", ask="point")


def test_a_run_makes_it_with_the_model_of_its_settings(tmp_path: Path) -> None:
    words = ["environment.name=grounding", f"environment.train_files=[{vlm_r1(tmp_path)}]", "environment.test_share=.5"]
    words += [f"run_dir={tmp_path}/run", "model.tiny={}", "environment.coordinates=pixels"]
    made = make_environment(load_config([], words))
    task = made.environment.tasks("train")[0]
    assert scored(made.grading.graders, task, made.environment.target(task)).accuracy == 1


def test_pixels_of_a_model_with_tiles_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_by, tiles = pictures(), PromptImage(key="", tensors={}, num_tokens=1, grid=(1, 1, 1))
    monkeypatch.setattr(seen_by, "_look", lambda _: tiles)
    with pytest.raises(ConfigError, match="tiles"):
        seen_by.seen(ImageRef(source=np.zeros((64, 64, 3), np.uint8)))


def test_answers_in_a_file_are_graded(tmp_path: Path) -> None:
    rows = [
        {"prediction": "[100,100,600,600]", "truth": [40, 20, 240, 120], "size": [400, 200], "frame": [1000, 1000]},
        {"prediction": "(41, 21)", "truth": [40, 20, 240, 120], "size": [400, 200], "ask": "point"},
        {"prediction": "[0,0,10,10]", "truth": [[0, 0, 10, 10], [20, 20, 30, 30]], "size": [400, 200]},
        {"prediction": "[0,0,10,10]", "truth": [[0, 0, 10, 10]], "size": [400, 200], "ask": "box"},
        {"prediction": "[0,0,10,10]", "truth": [0, 0, 10, 10]},
        {"prediction": "[0,0,10,10]", "size": [400, 200]},
        {"prediction": "[0,0,10,10]", "truth": [0, 0, 10, 10], "size": [400, 200], "ask": "poem"},
        {"prediction": "[0,0,10,10]", "truth": [0, 0, 10, 10], "size": [0, 200]},
    ]
    written: list[bytes] = []
    summary = grade_file("grounding", lines(tmp_path, rows), written.append)
    scores = [json.loads(line)["score"] for line in written]
    assert scores == [pytest.approx(1), 1, pytest.approx(2 / 3), 1, None, None, None, None]
    assert (summary.graded, set(summary.ungraded)) == (4, {"answer_kind", "answer_missing"})


def test_rows_in_memory_need_the_columns_of_their_layout(tmp_path: Path) -> None:
    """ScreenSpot's picture and truth are found by its layout, and a box under another name is asked for."""
    words = ["environment.name=grounding", "environment.layout=screenspot", "environment.train_files=[]"]
    words += ["environment.test_share=.5", "model.tiny={}"]
    words += [f"run_dir={tmp_path}/run", f"data.cache_dir={tmp_path}/cache"]
    config = load_config([], words)
    row = {"img_filename": Image.new("RGB", (400, 200)), "bbox": [40, 20, 200, 100], "instruction": "x"}
    rows = [{**row, "data_type": "icon"} for _ in range(4)]
    with rows_as_files(config, {"train": rows}) as written:
        assert written.files
    plain = config.model_copy(update={"environment": settings_of(tmp_path)})
    with (
        pytest.raises(DataError, match=r"environment\.answer_key"),
        rows_as_files(plain, {"train": [{"image": row["img_filename"], "problem": "x", "region": [1, 2, 3, 4]}]}),
    ):
        pass
