"""Records of tasks, messages, tools and scores, exchanged by an environment and the code that samples from a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:  # graders that read only text need not import these packages
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


FinishReason: TypeAlias = Literal["stop", "length"]


PixelChange: TypeAlias = "Callable[[NDArray[np.uint8]], NDArray[np.uint8]]"
"""A function that changes RGB values [height, width, 3] and keeps their shape (image augmentations of a run)."""


Conversion: TypeAlias = Literal["cmyk", "16_bit", "frames", "rotated"]
"""Conversions of an image that settings may allow (`ImageOpener.convert_images`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageRef:
    """Reference to an image that is not opened yet; only `fovea_gym.rows.images.ImageOpener` opens it."""

    source: bytes | str | NDArray[np.uint8] | Image
    """Encoded file content, a local path, a URL, RGB values [height, width, 3], or a Pillow image."""
    where: str = "image"
    """The image's name in error messages, such as `train.parquet row 12, image 1`."""
    change: PixelChange | None = None
    """A change to apply to the pixels after the image is opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of a data set, as an environment understands it."""

    id: str
    """Unique in its split and the same in every run; key of the prompt cache and of the order that a run resumes."""
    question: str
    """The user's text; `<image>` marks where an image goes; without a mark, images come first."""
    answer: str
    """The gold answer."""
    images: tuple[ImageRef, ...] = ()
    kind: str = "all"
    """The question type by which accuracies are reported."""
    row: Mapping[str, object] = field(default_factory=dict)
    """The row as it was read, for custom reward functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message; text and images in the order in which the model reads them."""

    role: Role
    parts: tuple[str | ImageRef, ...]
    tool: str = ""
    """Name of the tool whose result this message holds, if its role is `tool`."""
    failed: bool = False
    """True if the message reports that a tool call failed, or that the environment could not parse the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """The description of a tool that the model reads."""

    name: str
    description: str
    parameters: Mapping[str, object]
    """JSON schema of an object; its properties are the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool, as the model wrote it."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    r"""The end of an answer in a response: the brace that closes a `\boxed{...}`, or a `closing` string."""

    closing: str = ""
    """A string that ends the answer, such as `</answer>`; empty: a box ends it (`graders.math_answer.box_end`)."""
    after: str = ""
    """Text after which the search for the answer starts, such as `</think>`; empty: search from the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange: the messages that the environment added, and the model's answer."""

    messages: tuple[Message, ...]
    text: str
    finish: FinishReason = "stop"
    seconds: float = 0.0
    """Seconds that the environment took to produce the messages; 0 in the first turn."""
    num_tokens: int | None = None
    """Number of tokens of the answer, including the end token; None if unknown, as for a server that does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A box or a point on an image of a task, such as the box that a reward compared with the truth."""

    image: int
    """Number of the image among the task's images, from 1."""
    xy: tuple[float, ...]
    """x, y of a point, or x1, y1, x2, y2 of a box, as fractions of the image's width and height from its top left."""
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The grade of an episode."""

    reward: float
    accuracy: float
    """Correctness in 0..1, without the other parts of the reward; reported as accuracy."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The named parts of the reward, for logs and reports."""
    image_parts: tuple[Mapping[str, float], ...] = ()
    """Parts of the reward for each image of the task, in order; empty unless the reward distinguishes images."""
    marks: tuple[Mark, ...] = ()
    """Boxes and points to draw on the images of the task; they do not affect the reward."""
    turns: tuple[float, ...] = ()
    """One reward per turn, whose sum is `reward`; empty: the reward belongs to the whole episode."""
