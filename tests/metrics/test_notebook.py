"""The display of a notebook, by what it publishes; tests/test_notebooks.py runs it in a real kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from xml.etree import ElementTree

from fovea.metrics.progress import MAX_POINTS, NotebookDisplay, notebook_publisher


class Cell:
    """Outputs of a cell by display id, as a front end keeps them."""

    def __init__(self) -> None:
        self.outputs: dict[str, Mapping[str, str]] = {}
        self.updates = 0

    def publish(
        self, data: Mapping[str, str], *, transient: Mapping[str, str] | None = None, update: bool = False
    ) -> None:
        assert transient is not None
        assert update == (transient["display_id"] in self.outputs)
        self.outputs[transient["display_id"]] = data
        self.updates += 1

    @property
    def html(self) -> str:
        (output,) = self.outputs.values()
        return output["text/html"]


def test_a_run_is_one_output_that_says_what_is_new() -> None:
    cell, now = Cell(), [0.0]
    display = NotebookDisplay(cell, 1000, clock=lambda: now[0])
    display.stage("loading <b>the model</b>")
    assert "loading &lt;b&gt;the model&lt;/b&gt;" in cell.html
    for step in range(1, 1001):
        now[0] += 0.01
        display.step(step, {"reward": math.nan if step == 7 else step / 1000}, {"reward": f"r {step}"}, "0:01 left")
    assert cell.updates <= 21, "twice a second"
    display.close()
    assert 'max="1000" value="1000"' in cell.html
    assert "r 1000" in cell.html
    assert "loading" not in cell.html
    root = ElementTree.fromstring(f"<div>{cell.html.replace('&emsp;', ' ').replace('<br>', '<br/>')}</div>")
    (line,) = root.iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
    assert points == sorted(points), "steps go to the right"
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True), "a growing reward goes up"
    assert (points[0][0], points[-1][0]) == (0, 420)


def test_this_process_is_no_kernel() -> None:
    assert notebook_publisher() is None
