"""Small files in the layouts of VLM-R1, ScreenSpot and GUI-R1, with pictures drawn here."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fovea.config.model import Model
from fovea.wiring.frames import ModelPictures
from fovea_gym.environments.grounding.environment import Grounding
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.grounding import GroundingEnvironment

SIZE = (400, 200)
"""Width and height of the pictures."""


def picture(folder: Path, name: str = "one.png", size: tuple[int, int] = SIZE) -> str:
    Image.new("RGB", size, (90, 120, 40)).save(folder / name)
    return name


def settings_of(file: Path, **settings: object) -> GroundingEnvironment:
    return GroundingEnvironment.model_validate(
        {"name": "grounding", "train_files": (str(file),), "test_files": (str(file),), **settings}
    )


def pictures(family: str = "qwen3_vl", **settings: object) -> ModelPictures:
    model = Model.model_validate({"tiny": {"family": family}, **settings})
    return ModelPictures(model, ImageOpener(max_image_mib=8, max_image_megapixels=8, convert_images=("rotated",)))


def grounding(file: Path, family: str = "qwen3_vl", **settings: object) -> Grounding:
    return Grounding(settings_of(file, **settings), RowAccess(), pictures(family))


def lines(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    file = folder / name
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


def vlm_r1(folder: Path) -> Path:
    """The files for evaluation: a JSON list with `problem` and `solution`."""
    row = {"image": picture(folder), "problem": "the lady in blue", "dataset": "refcoco"}
    file = folder / "refcoco_val.json"
    rows = [{**row, "solution": box} for box in ([40, 20, 240, 120], [0.5, 1.25, 30, 40])]
    file.write_text(json.dumps(rows), encoding="utf-8")
    return file


def vlm_r1_conversations(folder: Path) -> Path:
    """The files for training: conversations, whose reply is the box."""
    turns = [
        {"from": "human", "value": "<image>Please give the bounding box of: the lady in blue"},
        {"from": "gpt", "value": "[40, 20, 240, 120]"},
    ]
    return lines(folder, [{"id": 1, "image": picture(folder), "conversations": turns}])


def screenspot(folder: Path) -> Path:
    row = {"img_filename": picture(folder), "bbox": [40, 20, 200, 100], "instruction": "open the settings"}
    file = folder / "screenspot_desktop.json"
    file.write_text(json.dumps([{**row, "data_type": "icon", "data_source": "windows"}]), encoding="utf-8")
    return file


def gui_r1(folder: Path) -> Path:
    """The Parquet file of GUI-R1: a picture in the row, places in shares of it, an action with its text."""
    content = io.BytesIO()
    Image.new("RGB", SIZE).save(content, "PNG")
    shared = {"image": {"bytes": content.getvalue(), "path": None}, "task_type": "high", "history": "None"}
    none = "no input text"
    rows = [
        {"gt_bbox": [0.1, 0.1, 0.6, 0.6], "instruction": "open it", "gt_action": "click", "gt_input_text": none},
        {"gt_bbox": [0.5, 0.5], "instruction": "open it", "gt_action": "click", "gt_input_text": none},
        {"gt_bbox": [0.5, 0.5], "instruction": "search", "gt_action": "type", "gt_input_text": "shanghai mall"},
        {"gt_bbox": [-100.0, -100.0], "instruction": "go home", "gt_action": "press_home", "gt_input_text": none},
    ]
    rows[3]["history"] = "opened the app"
    file = folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist([{**shared, **row} for row in rows]), file)
    return file
