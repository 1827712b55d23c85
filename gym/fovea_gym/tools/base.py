"""The protocol of a tool that the model may call, and the pictures and coordinates that it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from PIL import Image

from fovea_gym.rows.images import OpenImage, Size
from fovea_gym.types import ImageRef, ToolSpec

PICTURE_NUMBER = {"type": "integer", "description": "Number of the picture, from 1 in the order seen. Default: 1."}
"""JSON schema of an argument that chooses a picture."""


def object_schema(properties: Mapping[str, object], required: Sequence[str]) -> dict[str, object]:
    """JSON schema of the arguments of a tool."""
    return {"type": "object", "properties": properties, "required": list(required)}


class ToolError(Exception):
    """A call that a tool cannot serve. Its text is the answer to the model: one line with the cause and the fix."""


class BadResultError(ToolError):
    """A result that no message can hold: a fault of the tool, of which its author should know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture of the conversation, opened when a tool asks for it."""

    ref: ImageRef
    open_image: OpenImage
    shown: ImageRef | None = None
    """The picture that the model has seen in its place, such as a smaller one; None: the same."""

    @property
    def seen(self) -> ImageRef:
        """The picture on which the model gives coordinates."""
        return self.ref if self.shown is None else self.shown

    def opened(self) -> Image.Image:
        """The picture as RGB, in the size of its file; BadRowError where it cannot be opened."""
        return self.open_image(self.ref)


class Tool(Protocol):
    """A tool. Stateless, or safe to be called from several episodes at once."""

    @property
    def spec(self) -> ToolSpec:
        """Name, description and parameters, for the model."""
        ...

    async def call(self, arguments: Mapping[str, object], pictures: Sequence[Picture]) -> Sequence[str | ImageRef]:
        """The result: texts and pictures, in order; an exception is a failed call, whose first line the model reads.

        `arguments` have been checked against the spec; `pictures` are those of the conversation so far.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The frame in which a model gives coordinates on a picture."""

    description: str
    """Words for the descriptions of tools."""
    size: Callable[[ImageRef], Size]
    """Width and height of a picture in this frame."""


THOUSANDTHS = Frame(
    description="from 0 to 1000, as thousandths of the picture's width and height", size=lambda _picture: (1000, 1000)
)
"""The frame of Qwen3-VL and InternVL, and of models whose frame is not known."""


@runtime_checkable
class TakesCoordinates(Tool, Protocol):
    """A tool with coordinates among its arguments."""

    def in_frame(self, frame: Frame) -> Tool:
        """The tool for a model that gives coordinates in this frame."""
        ...

    def demonstrated(self, arguments: Mapping[str, object], pictures: Sequence[Picture]) -> Mapping[str, object]:
        """Arguments of a demonstration, which are thousandths, with their coordinates in the tool's frame."""
        ...
