"""Settings of the environments whose answers are boxes and points on a picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import Fraction, RowCount
from fovea_gym.settings.splits import DrawnRows, FileEnvironment

if TYPE_CHECKING:  # reading settings does not import the environments
    from fovea_gym.environments.access import Access
    from fovea_gym.environments.base import Environment

Ask: TypeAlias = Literal["box", "boxes", "point", "points"]
Coordinates: TypeAlias = Literal["model", "pixels", "thousandths", "unit", "original"]
Units: TypeAlias = Literal["original", "thousandths", "unit"]
BoxForm: TypeAlias = Literal["xyxy", "xywh"]
Layout: TypeAlias = Literal["rows", "screenspot", "gui_r1"]
RewardKind: TypeAlias = Literal["iou", "giou", "hit", "f1"]
REWARD_KINDS: dict[Ask, tuple[RewardKind, ...]] = {
    "box": ("iou", "giou", "hit"),
    "boxes": ("f1", "iou"),
    "point": ("hit",),
    "points": ("f1",),
}
"""Kinds of reward for each kind of answer; the first is the default."""
TRUTH_NAMES = ("solution", "gt_bbox", "bbox_2d", "bbox", "boxes", "point_2d", "point", "points", "answer", "truth")
"""Usual names of the column of the true boxes or points, and keys of an object in this column."""
LAYOUTS: dict[Layout, dict[str, object]] = {
    "rows": {},
    "screenspot": {
        "prompt_key": "instruction",
        "image_key": "img_filename",
        "answer_key": "bbox",
        "kind_key": "data_type",
        "box_form": "xywh",
        "prompt_template": "Find the element of this screenshot for the command: {prompt}\n"
        'Answer with its point as {"point_2d": [x, y]}.',
    },
    "gui_r1": {
        "prompt_key": "instruction",
        "image_key": "image",
        "answer_key": "gt_bbox",
        "kind_key": "gt_action",
        "action_key": "gt_action",
        "text_key": "gt_input_text",
        "truth_units": "unit",
        "prompt_template": "The task on this screenshot: {prompt}\n"
        "Answer with the next action (click, type, scroll, select, enter, press_home, press_back, close/delete or "
        "complete) as [{'action': 'click', 'point': [x, y], 'input_text': 'no input text'}].",
    },
}
"""Default settings of each published layout."""


class GroundingEnvironment(FileEnvironment):
    """Boxes and points on a picture: referring expressions, detection, clicks on screenshots."""

    name: Literal["grounding"] = "grounding"
    layout: Layout = "rows"
    """Published layout, which sets the columns, units and prompt that are not set otherwise. rows: your own columns, or
    VLM-R1's (problem and solution, or conversations)."""
    ask: Ask | None = None
    """The answer to ask for: one box, several boxes, one point in the true box, or one point in each of several boxes;
    default: box, and point for screenshots."""
    coordinates: Coordinates = "model"
    """Coordinates of the answers. model: as the model's family writes them; pixels: pixels of the picture as resized
    for the model; thousandths: 0 to 1000; unit: 0 to 1; original: pixels of the picture as stored."""
    truth_units: Units | None = None
    """Units of the true boxes and points; default: pixels of the picture as stored (original)."""
    box_form: BoxForm | None = None
    """Numbers of a true box. xyxy: left, top, right, bottom (default); xywh: left, top, width, height, as in COCO."""
    reward_kind: RewardKind | None = None
    """Reward for the box or point. Box: iou (default), giou as (1 + GIoU) / 2, hit as 0 or 1; boxes: f1 of the hits
    (default), or iou as 2 * sum of IoU / (boxes + true boxes); point: hit; points: f1."""
    min_iou: Fraction = 0.0
    """IoU below which a box gets no reward (reward_kind=iou); Visual-RFT uses 0.5, VLM-R1 0."""
    format_weight: Fraction = 0.1
    """Share of the reward for the format: the answer holds exactly one box or point, or one list of them."""
    think_tags: bool = False
    """Require reasoning that ends in `</think>` before the answer, as part of the format."""
    answer_tags: bool = False
    """Require `<answer>` tags around the answer, as part of the format."""
    action_key: str | None = None
    """Column of the action on a screenshot (click, type, scroll and others), which must be right, too."""
    text_key: str | None = None
    """Column of the text of an action that is not a click."""

    @property
    def with_layout(self) -> GroundingEnvironment:
        """The settings, completed with the layout's values for those that are not set."""
        open_keys = {key: value for key, value in LAYOUTS[self.layout].items() if getattr(self, key) is None}
        return self.model_copy(update=open_keys)

    @property
    def asked(self) -> Ask:
        return self.ask or ("box" if self.layout == "rows" else "point")

    @property
    def rewarded(self) -> RewardKind:
        return self.reward_kind or REWARD_KINDS[self.asked][0]

    @property
    def answer_names(self) -> tuple[str, ...]:
        return TRUTH_NAMES

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        keys = {"action_key": self.action_key, "text_key": self.text_key}
        return super().named_columns + [(key, name) for key, name in keys.items() if name is not None]

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from _unfit_reward(self.reward_kind, self.asked)
        if self.min_iou > 0 and self.rewarded != "iou":
            yield (f".min_iou={self.min_iou:g} applies to reward_kind=iou, and this is {self.rewarded}; drop it")
        settings = self.with_layout
        if settings.text_key is not None and settings.action_key is None:
            yield f".text_key={self.text_key} is the text of an action, whose column is not set; set .action_key"
        if settings.action_key is not None and self.asked != "point":
            yield (f".ask={self.asked}, but an action (.action_key) has one point; set .ask=point")

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.environments.grounding.environment import Grounding

        if access.pictures is None:
            raise ConfigError("grounding needs the coordinates of a model to read answers; pass Access(pictures=...)")
        return Grounding(self, access, access.pictures)


class GroundingShapesEnvironment(DrawnRows):
    """Rendered scenes with questions that ask where a shape is; the true boxes come from the renderer."""

    name: Literal["grounding_shapes"] = "grounding_shapes"
    ask: Literal["box", "boxes", "point"] = "box"
    """The answer to ask for: the box of one shape, the boxes of all shapes of a colour, or a point in the box."""
    num_shapes: Annotated[int, Field(ge=1, le=6)] = 3
    """Number of shapes in a scene."""
    scale: Annotated[int, Field(ge=10, le=10_000)] = 1000
    """Coordinate of the right and the lower edge; Qwen3-VL gives coordinates from 0 to 1000."""
    reward_kind: RewardKind | None = None
    """Reward for the box or point, as in `grounding`."""
    format_weight: Fraction = 0.1
    """Share of the reward for an answer that consists only of the box or point."""
    test_size: RowCount = 600
    """Number of held-out scenes for the final table."""

    def contradictions(self) -> Iterator[str]:
        yield from _unfit_reward(self.reward_kind, self.ask)

    def make(self, access: Access, seed: int) -> Environment:
        from fovea_gym.environments.grounding.shapes import GroundingShapes

        return GroundingShapes(self, seed)


def _unfit_reward(kind: RewardKind | None, ask: Ask) -> Iterator[str]:
    if kind is not None and kind not in REWARD_KINDS[ask]:
        yield (f".reward_kind={kind} does not grade the answers of .ask={ask}; choose {' or '.join(REWARD_KINDS[ask])}")
