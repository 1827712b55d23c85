"""A small web page of controls in a grid, some of them behind a menu: as a list of controls, a picture and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Kind: TypeAlias = Literal["button", "box", "knob"]
Colour: TypeAlias = Literal["red", "green", "blue", "yellow"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COLOURS: tuple[Colour, ...] = get_args(Colour)
MENU = "menu"

_RGB = {"red": "#dc2d28", "green": "#28af41", "blue": "#2d50e1", "yellow": "#ebd22d", MENU: "#555555"}
_PAGE = "#f4f4f4"
_CELLS = 3
_CELL = 1 / _CELLS
_SIZES: dict[str, tuple[float, float]] = {
    "button": (0.29, 0.15),
    "box": (0.2, 0.2),
    "knob": (0.24, 0.24),
    MENU: (0.24, 0.24),
}
"""Width and height of each kind, in shares of the page's side; all fit into a cell."""
_OVERSAMPLING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One control; the box is left, top, right, bottom in shares of the page's side."""

    kind: Kind | Literal["menu"]
    colour: Colour | Literal["menu"]
    box: tuple[float, float, float, float]

    @property
    def name(self) -> str:
        """Words for the control: `red knob`."""
        return MENU if self.kind == MENU else f"{self.colour} {self.kind}"

    @property
    def centre(self) -> tuple[float, float]:
        left, top, right, bottom = self.box
        return (left + right) / 2, (top + bottom) / 2

    def is_hit(self, x: float, y: float) -> bool:
        """True if a click at this place hits the control; a knob is round."""
        left, top, right, bottom = self.box
        if self.kind == "knob":
            (centre_x, centre_y), radius = self.centre, (right - left) / 2
            return (x - centre_x) ** 2 + (y - centre_y) ** 2 < radius**2
        return left <= x < right and top <= y < bottom


def random_controls(count: int, rng: np.random.Generator, *, menu: bool = False) -> tuple[Control, ...]:
    """Controls that differ in kind or colour, each somewhere in its cell of the grid; with `menu`, the first is a menu.

    The second has the kind of the first, and the third its colour, so that neither word of the first's name is enough
    to find it.
    """
    looks: list[tuple[Any, Any]] = list(product(KINDS, COLOURS))
    shuffled = [looks[place] for place in rng.permutation(len(looks))]
    kind, colour = shuffled[0]
    same_kind = next(look for look in shuffled[1:] if look[0] == kind)
    same_colour = next(look for look in shuffled[1:] if look[1] == colour)
    chosen = list(dict.fromkeys([shuffled[0], same_kind, same_colour, *shuffled]))[:count]
    cells = rng.permutation(_CELLS**2)[:count]
    shown = [(MENU, MENU), *chosen[1:]] if menu else chosen
    return tuple(_placed(kind, colour, int(cell), rng) for (kind, colour), cell in zip(shown, cells, strict=True))


def _placed(
    kind: Kind | Literal["menu"], colour: Colour | Literal["menu"], cell: int, rng: np.random.Generator
) -> Control:
    row, column = divmod(cell, _CELLS)
    width, height = _SIZES[kind]
    left = column * _CELL + rng.uniform(0, _CELL - width)
    top = row * _CELL + rng.uniform(0, _CELL - height)
    return Control(kind=kind, colour=colour, box=(left, top, left + width, top + height))


def picture(controls: Sequence[Control], side_px: int) -> NDArray[np.uint8]:
    """The page as a picture [side, side, 3], which is like Chromium's of `html` but not equal pixel for pixel."""
    side = side_px * _OVERSAMPLING
    image = Image.new("RGB", (side, side), _PAGE)
    pen = ImageDraw.Draw(image)
    for control in controls:
        box = [share * side for share in control.box]
        pen.rounded_rectangle(box, radius=_radius(control) * side, fill=_RGB[control.colour])
        if control.kind == MENU:
            for left, top, right, bottom in _bars(control):
                pen.rectangle([left * side, top * side, right * side, bottom * side], fill=_PAGE)
    return np.asarray(image.resize((side_px, side_px), Image.Resampling.BOX), dtype=np.uint8)


def html(controls: Sequence[Control]) -> str:
    """The page as HTML that fills the window, for a browser; a click writes the control's name into the title."""
    style = "position:fixed;inset:0;margin:0;background:" + _PAGE
    script = "document.title=event.target.dataset.name||'page'"
    return f"<!doctype html><title></title><body style='{style}' onclick=\"{script}\">" + "".join(
        _element(control) for control in controls
    )


def _element(control: Control) -> str:
    bars = "".join(
        f"<i data-name={MENU} style='position:fixed;background:{_PAGE};{_place(bar)}'></i>"
        for bar in (_bars(control) if control.kind == MENU else ())
    )
    radius = "50%" if control.kind == "knob" else f"{100 * _radius(control):.4f}vw"
    look = f"position:fixed;background:{_RGB[control.colour]};border-radius:{radius};{_place(control.box)}"
    return f'<b data-name="{control.name}" style="{look}"></b>{bars}'


def _place(box: tuple[float, float, float, float]) -> str:
    left, top, right, bottom = (100 * share for share in box)
    return f"left:{left:.4f}vw;top:{top:.4f}vh;width:{right - left:.4f}vw;height:{bottom - top:.4f}vh"


def _radius(control: Control) -> float:
    """Radius of the corners: a knob is a circle, a box has square corners."""
    return {"knob": 0.12, "button": 0.03}.get(control.kind, 0.0)


def _bars(control: Control) -> list[tuple[float, float, float, float]]:
    """The three bars on the control that opens the menu."""
    left, top, right, bottom = control.box
    inset, height = 0.2 * (right - left), (bottom - top) / 9
    return [(left + inset, top + height * row, right - inset, top + height * (row + 1)) for row in (2, 4, 6)]
