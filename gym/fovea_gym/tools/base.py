"""The protocol of tools that the model may call, and the pictures and coordinates that tools get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from PIL import Image

from fovea_gym.rows.images import OpenImage, Size
from fovea_gym.types import ImageRef, ToolSpec

PICTURE_NUMBER = {"type": "integer", "description": "Number of the picture, from 1 in the order seen. Default: 1."}
"""JSON schema of an argument that chooses a picture of the conversation."""


def object_schema(properties: Mapping[str, object], required: Sequence[str]) -> dict[str, object]:
    """JSON schema for the arguments of a tool."""
    return {"type": "object", "properties": properties, "required": list(required)}


class ToolError(Exception):
    """A tool cannot handle a call. The model reads the text as the answer: one line with the cause and the fix."""


class BadResultError(ToolError):
    """A tool returned a result that does not fit in a message: a bug of the tool, which its author should learn of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture of the conversation, which is opened when a tool needs it."""

    ref: ImageRef
    open_image: OpenImage
    shown: ImageRef | None = None
    """The picture that the model has seen instead, such as a smaller copy; None if it has seen `ref`."""

    @property
    def seen(self) -> ImageRef:
        """The picture that the model has seen, to which its coordinates refer."""
        return self.ref if self.shown is None else self.shown

    def opened(self) -> Image.Image:
        """The picture as RGB, in the size of its file; BadRowError if it cannot be opened."""
        return self.open_image(self.ref)


class Tool(Protocol):
    """A tool that the model may call; several episodes may call it at once."""

    @property
    def spec(self) -> ToolSpec:
        """The tool's name, description and parameters, which the model reads."""
        ...

    async def call(self, arguments: Mapping[str, object], pictures: Sequence[Picture]) -> Sequence[str | ImageRef]:
        """Return texts and pictures, in order; if it raises, the call has failed and the model reads the first line.

        `arguments` have been checked against the spec; `pictures` are the pictures of the conversation so far.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The coordinate frame that a model uses for positions on a picture."""

    description: str
    """Description of the frame, for the descriptions of tools."""
    size: Callable[[ImageRef], Size]
    """Width and height of a picture in this frame."""


THOUSANDTHS = Frame(
    description="from 0 to 1000, as thousandths of the picture's width and height", size=lambda _picture: (1000, 1000)
)
"""The frame of Qwen3-VL and InternVL, and the default for models whose frame is unknown."""


@runtime_checkable
class TakesCoordinates(Tool, Protocol):
    """A tool with coordinates among its arguments."""

    def in_frame(self, frame: Frame) -> Tool:
        """A copy of the tool for a model that gives coordinates in this frame."""
        ...

    def demonstrated(self, arguments: Mapping[str, object], pictures: Sequence[Picture]) -> Mapping[str, object]:
        """Arguments of a demonstration with their coordinates converted from thousandths to the tool's frame."""
        ...
