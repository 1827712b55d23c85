"""Tools of the parts of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fovea.errors import ModelError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.run.context import Run
from fovea_gym.errors import ConfigError
from fovea_gym.tools.session import demonstrated_call
from fovea_gym.types import ImageRef, Message, Turn
from fovea_gym.utils.event_loop import wait_for
from tests.tiny_models import save, tiny
from tests.wiring.small import run_of

SCENES = {"name": "shapes", "train_size": 8, "dev_size": 2, "test_size": 2}
PARTS = {
    "far": {"environment": {**SCENES, "tools": ["zoom", "calculator"], "max_tool_turns": 2}},
    "near": {"environment": SCENES},
    "squares": {"environment": {**SCENES, "tools": ["rotate"], "max_tool_turns": 1}},
}


def mixed_run(folder: Path, **environment: object) -> Run:
    return run_of(
        folder,
        environment={"name": "mixture", "parts": PARTS, **environment},
        data={"max_prompt_tokens": 4000},
        max_steps=1,
        rollout={"prompts_per_step": 6, "samples_per_prompt": 2, "max_new_tokens": 3},
        evaluate={"image_controls": False},
    )


def test_every_part_of_a_mixture_has_its_tools(tmp_path: Path) -> None:
    run = mixed_run(tmp_path)
    environment = run.environment
    assert environment.uses_tools
    tasks = {task.id.partition("/")[0]: task for task in environment.tasks("train")}
    names = {part: [tool.spec.name for tool in environment.tools(task)] for part, task in tasks.items()}
    assert names == {"far": ["zoom", "calculator"], "near": [], "squares": ["rotate"]}
    assert {part: environment.turns_of(task) for part, task in tasks.items()} == {"far": 3, "near": 1, "squares": 2}
    lengths = {part: run.sources.train.render(task).prompt.num_tokens for part, task in tasks.items()}
    assert lengths["near"] < lengths["squares"] < lengths["far"]

    async def replied(part: str, text: str) -> Sequence[Message] | None:
        session = await environment.open(tasks[part], 0)  # type: ignore[attr-defined]
        try:
            return await session.reply([Turn(messages=tuple(environment.prompt(tasks[part])), text=text)])
        finally:
            await session.close()

    zoom = demonstrated_call("zoom", {"box": [0, 0, 500, 500]})
    (picture,) = wait_for(replied("far", zoom)) or ()
    assert isinstance(picture.parts[0], ImageRef)
    (refused,) = wait_for(replied("squares", zoom)) or ()
    assert refused.parts == ("Error: there is no tool zoom; the tools are rotate",)
    assert wait_for(replied("near", zoom)) is None
    train(run)
    assert [step["step"] for step in read_metrics(tmp_path)] == [1]


def test_tools_are_those_of_parts_or_of_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment.parts.far has tools, and the mixture has tools for all parts"):
        mixed_run(tmp_path, tools=["zoom"])


def test_a_template_without_pictures_of_tools_is_named_at_the_start(tmp_path: Path) -> None:
    folder = save(tiny("qwen3_vl"), tmp_path / "model")
    file = folder / "chat_template.jinja"
    written = file.read_text()
    file.write_text(
        written.replace("{%- if part.type == 'image' -%}", "{%- if part.type == 'image' and message.role != 'tool' -%}")
    )
    assert file.read_text() != written
    settings = {"environment": {**SCENES, "tools": ["zoom"], "max_tool_turns": 1}, "model": {"path": str(folder)}}
    with pytest.raises(
        ModelError, match=r"environment.tools: zoom return pictures, which the chat template of .*model leaves"
    ):
        run_of(tmp_path / "run", **settings)
