"""Names in `tools`: built-in tools, functions in files and modules, and the errors of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea_gym.errors import ConfigError
from fovea_gym.tools.calculator import Calculator
from fovea_gym.tools.loading import load_tools
from gym_tests.tables import table

TEN_LINES = '''
from PIL import Image

def brightness(image: Image.Image, channel: int = 0) -> float:
    """Mean brightness of a picture.

    Args:
        channel: 0 for red, 1 for green, 2 for blue.
    """
    values = list(image.getchannel(channel).getdata())
    return sum(values) / len(values)

def zoom(factor: int) -> str:
    """Another zoom.

    Args:
        factor: A number.
    """
    return str(factor)

NUMBER = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(TEN_LINES)
    return path


def test_tools_are_built_in_or_in_files_and_modules(file: Path) -> None:
    module = "fovea_gym.tools.picture_tools:ZOOM_AT"
    tools = load_tools(["zoom", "calculator", f"{file}:brightness", module], allow_python=False)
    assert [tool.spec.name for tool in tools] == ["zoom", "calculator", "brightness", "zoom_at"]
    (tool,) = load_tools(["python:fovea.Calculator"], allow_python=False, given=[Calculator()])
    assert tool.spec.name == "calculator"


@table(
    ("name", "says"),
    [
        ("zooom", "no built-in tool is called zooom; did you mean zoom?"),
        ("browser", "no built-in tool is called browser; name one of zoom, zoom_at, .*, or path/to/file.py:function"),
        ("missing.py:f", "tools=missing.py:f: there is no file missing.py"),
        ("{file}:brightnes", "has no brightnes; did you mean brightness?"),
        ("{file}:NUMBER", "is of type int; name a function or a tool"),
        ("no_such_module:f", "tools=no_such_module:f cannot be imported: it raised ModuleNotFoundError"),
        ("python:__main__.f", "is an object that was passed from Python code"),
        ("python", "set allow_python=true if you want that"),
    ],
)
def test_a_name_without_a_tool_is_one_line_with_the_fix(name: str, says: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_tools([name.format(file=file)], allow_python=False)
    assert "\n" not in str(caught.value)


def test_two_tools_of_one_name_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=f"zoom and {file}:zoom"):
        load_tools(["zoom", f"{file}:zoom"], allow_python=False)
