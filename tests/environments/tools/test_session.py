"""Episodes with tools: calls and their results, failures in one line, demonstrations in the format of the model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fovea.models.render import Renderer
from fovea_gym.environments.base import Environment, Session, Split
from fovea_gym.tools.base import THOUSANDTHS, Frame, Tool
from fovea_gym.tools.calculator import Calculator
from fovea_gym.tools.calls.base import CallFormat
from fovea_gym.tools.calls.gemma_calls import GemmaCalls
from fovea_gym.tools.calls.json_calls import JsonCalls
from fovea_gym.tools.calls.xml_calls import XmlCalls
from fovea_gym.tools.function import function_tool
from fovea_gym.tools.picture_tools import ZOOM
from fovea_gym.tools.results import ResultLimits
from fovea_gym.tools.session import ToolUse, WithTools, demonstrated_call
from fovea_gym.types import ImageRef, Message, Score, Task, Turn
from gym_tests.images import from_array
from gym_tests.tables import table
from gym_tests.tools.pictures import quartered
from tests.tiny_models import tiny

TASK = Task(id="a", question="Where?", answer="red", images=(ImageRef(source=quartered()),))


class Scene(Environment):
    """One picture with a zoom; a turn without a call that does not say red is asked again."""

    max_turns = 3

    def tasks(self, split: Split) -> Sequence[Task]:
        return [TASK]

    def prompt(self, task: Task) -> Sequence[Message]:
        return [Message(role="user", parts=(*task.images, task.question))]

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        return None if "red" in turns[-1].text else [Message(role="user", parts=("Try again.",))]

    def target(self, task: Task) -> str:
        return task.answer

    def tools(self, task: Task) -> Sequence[Tool]:
        return [ZOOM]

    def demonstration(self, task: Task) -> Sequence[str]:
        return [demonstrated_call("zoom", {"box": [0, 0, 500, 500]}, "I look."), self.target(task)]


def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    raise KeyError(f"no entry for\n{word}")


def chatty() -> str:
    """Say something."""
    print("now I work")
    return "done"


def made(result: Any) -> Any:
    def picture() -> object:
        """Make a picture."""
        return result

    return function_tool(picture, "picture")


class Use:
    """A ToolUse of a model, and the warnings that it got."""

    def __init__(self, format_: CallFormat, frame: Frame = THOUSANDTHS, image_root: str | None = None) -> None:
        self.warnings: list[str] = []
        render = Renderer(tiny("qwen3_vl").processor, from_array)
        self.use = ToolUse(
            format=format_,
            frame=frame,
            limits=ResultLimits(open_image=from_array, image_root=image_root),
            check_picture=lambda ref: render.fewest_tokens([Message(role="tool", parts=(ref,))]),
            warn=self.warnings.append,
        )

    def replies(self, text: str, *tools: Tool, environment: Environment | None = None) -> Sequence[Message] | None:
        """The reply to one turn of this text."""
        wrapped = WithTools(environment or Scene(), self.use, tools)
        asked = tuple(wrapped.prompt(TASK))

        async def run() -> Sequence[Message] | None:
            session = await wrapped.open(TASK, 0)
            reply = await session.reply([Turn(messages=asked, text=text)])
            await session.close()
            return reply

        return asyncio.run(run())


def results(use: Use, text: str, *tools: Tool, environment: Environment | None = None) -> list[Message]:
    return list(use.replies(text, *tools, environment=environment) or ())


def picture_of(message: Message) -> Image.Image:
    (part,) = message.parts
    return from_array(part)


def call(name: str, **arguments: object) -> str:
    return demonstrated_call(name, arguments)


def test_calls_of_a_turn_are_answered_in_order_and_other_turns_by_the_environment() -> None:
    use = Use(JsonCalls())
    text = call("zoom", box=[0, 0, 500, 500]) + call("calculator", expression="6 * 7") + call("zoom", box=[0, 0, 9])
    zoomed, computed, failed = found = results(use, text, Calculator())
    assert [(each.tool, each.failed) for each in found] == [("zoom", False), ("calculator", False), ("zoom", True)]
    assert {each.role for each in found} == {"tool"}
    assert picture_of(zoomed).getpixel((40, 20)) == (255, 0, 0)
    assert (*computed.parts, *failed.parts) == ("42", "Error: box has 3 entries; give 4")
    assert use.replies("It is red.") is None
    assert results(use, "It is blue.")[0].parts == ("Try again.",)
    assert use.warnings == []


def test_a_tool_may_look_at_pictures_that_came_back() -> None:
    wrapped = WithTools(Scene(), Use(JsonCalls()).use)
    first = Turn(messages=tuple(wrapped.prompt(TASK)), text=call("zoom", box=[0, 0, 1000, 500]))

    async def run() -> Sequence[Message] | None:
        session = await wrapped.open(TASK, 0)
        back = await session.reply([first])
        assert back is not None
        second = Turn(messages=tuple(back), text=call("zoom", box=[500, 0, 1000, 1000], image=2))
        return await session.reply([first, second])

    found = asyncio.run(run())
    assert found is not None
    assert set(picture_of(found[0]).get_flattened_data()) == {(0, 255, 0)}


@table(
    ("text", "says"),
    [
        ("<tool_call>zoom(1)</tool_call>", "Error: the tool call is not valid JSON"),
        (call("zoon", box=[0, 0, 1, 1]), "Error: there is no tool zoon; the tools are zoom, lookup, chatty, picture"),
        (call("zoom"), "Error: zoom needs the argument box; its arguments are box, image"),
        (call("zoom", box=[0, 0, 9, 9], colour="red"), "Error: zoom has no argument colour; its arguments are box"),
        (call("zoom", box="0 0 9 9"), "Error: box is '0 0 9 9'; give array"),
        (call("zoom", box=[0, 0, "9", 9]), "Error: box[2] is '9'; give number"),
        (call("zoom", box=[0, 0, 9, 9], image=True), "Error: image is True; give integer"),
        (call("lookup", word="x"), "Error: KeyError: 'no entry for"),
        (call("zoom", box=[0, 0, 2000, 9]), "Error: box holds 2000, outside the picture"),
    ],
)
def test_a_call_that_fails_is_one_line_for_the_model(text: str, says: str) -> None:
    tools = [function_tool(lookup, "lookup"), function_tool(chatty, "chatty"), made("x")]
    (message,) = results(Use(JsonCalls()), text, *tools)
    part = str(message.parts[0])
    assert message.failed
    assert part.startswith(says)
    assert "\n" not in part
    assert "Traceback" not in part


def test_calls_of_a_turn_and_texts_have_limits() -> None:
    found = results(Use(JsonCalls()), call("calculator", expression="1") * 20, Calculator())
    assert (len(found), found[-1].parts) == (9, ("Error: at most 8 calls are made in a turn",))
    (message,) = results(Use(JsonCalls()), call("picture"), made("ab" * 5_000))
    assert message.parts == ("ab" * 4_000 + "... (2000 more characters)",)


@table(
    ("result", "says"),
    [
        (Image.new("RGB", (20_000, 1_000)), "returned a picture of 20000x1000 pixels; the limit is 16 megapixels"),
        (np.zeros((5000, 5000, 3), np.uint8), "picture returned a picture of 5000x5000 pixels"),
        (np.zeros((4, 4), np.float32), "an array of float32 with shape [4, 4] is not an RGB picture"),
        (ImageRef(source=b"no picture"), "picture returned a picture that cannot be shown"),
        (ImageRef(source="/etc/passwd"), "picture returned the path /etc/passwd, which is not inside image_root"),
        (ImageRef(source="https://a.org/a.png"), "picture returned the path https://a.org/a.png, which is not"),
        ([quartered()] * 9, "picture returned 9 pictures; the limit is 8"),
        (Image.new("RGB", (1000, 1)), "the image processor refuses it"),
        (None, "picture returned an object of type NoneType; a tool returns a text"),
    ],
)
def test_a_result_that_cannot_be_shown_is_one_line_that_names_the_tool(result: object, says: str) -> None:
    use = Use(JsonCalls())
    (message,) = results(use, call("picture"), made(result))
    assert message.failed
    assert says in str(message.parts[0])
    (line,) = use.warnings
    assert line.startswith("tool picture ")
    assert "\n" not in line


def test_a_path_inside_the_folder_of_images_is_opened(tmp_path: Path) -> None:
    quartered().save(tmp_path / "a.png")
    use = Use(JsonCalls(), image_root=str(tmp_path))
    for place, fails in {"a.png": False, "../a.png": True}.items():
        (message,) = results(use, call("picture"), made(ImageRef(source=str(tmp_path / place))))
        assert message.failed == fails


def test_prints_of_a_tool_stay_out_of_the_console_and_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    use, tool, stdout = Use(JsonCalls()), function_tool(chatty, "chatty"), sys.stdout
    assert [each.parts for each in results(use, call("chatty") * 3, tool)] == [("done",)] * 3
    assert use.warnings == ["tool chatty printed 'now I work', which the model does not see; return it (reported once)"]
    print("of the run")
    assert capsys.readouterr().out == "of the run\n"
    assert sys.stdout is stdout


@table(
    ("format_", "text"),
    [
        (JsonCalls(), 'I look.\n<tool_call>\n{"name": "zoom", "arguments": {"box": [0, 0, 40, 20]}}\n</tool_call>'),
        (
            XmlCalls(),
            "I look.\n\n<tool_call>\n<function=zoom>\n<parameter=box>\n[0, 0, 40, 20]\n</parameter>\n</function>\n"
            "</tool_call>",
        ),
        (GemmaCalls(), "I look.<|tool_call>call:zoom{box:[0,0,40,20]}<tool_call|>"),
    ],
)
def test_a_demonstration_is_in_the_format_and_the_frame_of_the_model(format_: CallFormat, text: str) -> None:
    frame = Frame(description="in pixels", size=lambda ref: from_array(ref).size)
    use = Use(format_, frame)
    first, second = WithTools(Scene(), use.use).demonstration(TASK)
    assert (first, second) == (text, "red")
    assert not results(use, first)[0].failed


class Reduced(Scene):
    """Shows half of the size of its picture."""

    def prompt(self, task: Task) -> Sequence[Message]:
        return [Message(role="user", parts=(ImageRef(source=quartered(40, 20)), task.question))]


def test_tools_work_on_the_original_of_a_picture_that_the_prompt_shows_smaller() -> None:
    frame = Frame(description="in pixels", size=lambda ref: from_array(ref).size)
    (message,) = results(Use(JsonCalls(), frame), call("zoom", box=[0, 0, 40, 20]), environment=Reduced())
    assert picture_of(message).size == (80, 40)


class Game(Scene):
    """An environment whose session scores the episode, and counts its ends."""

    closed = 0

    async def open(self, task: Task, seed: int) -> Session:
        return Play(self)


class Play(Session):
    def __init__(self, game: Game) -> None:
        self.game = game

    async def reply(self, turns: Sequence[Turn]) -> None: ...

    async def score(self, turns: Sequence[Turn]) -> Score:
        return Score(reward=0.25, accuracy=1.0)

    async def close(self) -> None:
        self.game.closed += 1


def test_sessions_of_an_environment_keep_their_score_and_are_closed() -> None:
    game = Game()
    wrapped = WithTools(game, Use(JsonCalls()).use)

    async def run() -> Score | None:
        session = await wrapped.open(TASK, 0)
        assert session.has_score
        await session.close()
        return await session.score([])

    assert asyncio.run(run()) == Score(reward=0.25, accuracy=1.0)
    assert game.closed == 1
    assert wrapped.has_sessions
    assert wrapped.uses_tools
    plain = asyncio.run(WithTools(Scene(), Use(JsonCalls()).use).open(TASK, 0))
    assert not plain.has_score
    assert asyncio.run(plain.score([])) is None
