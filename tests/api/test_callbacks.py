"""Callbacks and tools of a run from Python: when each is called and with what, and what an exception in one does."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fovea
from fovea.metrics.names import definition_of
from fovea.run import recorded
from fovea.run.callbacks import Callbacks
from fovea_gym.environments.base import Environment, Split
from fovea_gym.errors import ConfigError
from fovea_gym.tools.session import demonstrated_call
from fovea_gym.types import Message, Score, Task, Turn
from gym_tests.tables import table
from tests.api.small import SETTINGS, of_rows, of_shapes, picture, rows, score
from tests.cluster.torchrun_runs import run_on

pytestmark = pytest.mark.usefixtures("in_tmp_path")

ROOT = Path(__file__).parents[2]


def test_each_step_and_evaluation_is_one_call_in_their_order() -> None:
    seen: list[fovea.StepRecord | fovea.EvalRecord] = []
    evaluate = {**SETTINGS["evaluate"], "every_steps": 1, "before_training": True}  # type: ignore[dict-item]
    settings = of_shapes(warmup={"max_steps": 1, "check_every_steps": 1}, evaluate=evaluate)
    run = fovea.GRPO(settings=settings, on_step=seen.append, on_eval=seen.append).train()
    steps = [record for record in seen if isinstance(record, fovea.StepRecord)]
    assert [(each.step, each.max_steps, each.folder) for each in steps] == [(1, 2, run.folder), (2, 2, run.folder)]
    assert [{"step": record.step, **record.metrics} for record in steps] == run.metrics
    assert all(definition_of(name) for record in steps for name in record.metrics)
    order = [f"step {r.step}" if isinstance(r, fovea.StepRecord) else f"{r.split}-{r.when} {r.step}" for r in seen]
    # a reading of dev rows belongs to its step, whose metrics hold it
    assert any(entry.startswith("dev-warmup") for entry in order)
    assert [entry for entry in order if not entry.startswith("dev-warmup")] == [
        *("test-before 0", "test-after-warmup 0", "dev-step-000001 1", "step 1", "dev-step-000002 2", "step 2"),
        "test-final 2",
    ]
    for record in seen:
        if isinstance(record, fovea.EvalRecord):
            assert (record.evaluation.num_rows, 0 <= record.evaluation.accuracy <= 1) == (2, True)
            assert (record.folder / "answers" / f"{record.split}-{record.when}.jsonl").is_file()
    assert run.summary is not None
    (final,) = [record for record in seen if isinstance(record, fovea.EvalRecord) and record.when == "final"]
    assert run.summary["accuracy"]["final"] == pytest.approx(final.evaluation.accuracy)


def test_a_run_with_callbacks_resumes_without_them() -> None:
    """And the other way round: they are not settings."""
    steps: list[int] = []
    fovea.GRPO(settings=of_shapes(), on_step=lambda record: steps.append(record.step)).train()
    again = of_shapes(resume="auto")
    fovea.GRPO(settings={**again, "max_steps": 3}).train()
    fovea.GRPO(settings={**again, "max_steps": 4}, on_step=lambda record: steps.append(record.step)).train()
    assert steps == [1, 2, 4]


@pytest.mark.parametrize("code", [None, 0, 1, "done", 143])
def test_a_callback_that_exits_is_an_error_but_for_a_signal(code: object) -> None:
    """The end by max_hours is a SystemExit with code 0, after which `train` returns."""
    callbacks = Callbacks(on_step=lambda record: sys.exit(code))  # type: ignore[arg-type]
    told = re.escape(f"at step 1 called sys.exit({code!r}), which does not end a run")
    with pytest.raises(SystemExit, match="143") if code == 143 else pytest.raises(RuntimeError, match=told):
        callbacks.stepped(fovea.StepRecord(step=1, max_steps=2, metrics={}, folder=Path("run")))


BREAKS = """
import fovea
from tests.api.small import of_shapes

def follow(record):
    if {condition}:
        raise KeyError("no such metric")

fovea.GRPO(settings=of_shapes(**{{"checkpoint.every_steps": 1}}), {argument}=follow).train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "condition", "named"),
    [
        ("on_step", "record.step == 1", "on_step=python:__main__.follow at step 1"),
        ("on_eval", "record.when == 'final'", "on_eval=python:__main__.follow of the evaluation test-final"),
    ],
)
def test_an_exception_ends_the_run_with_its_traceback_and_the_callbacks_name(
    argument: str, condition: str, named: str
) -> None:
    Path("follow.py").write_text(BREAKS.format(argument=argument, condition=condition))
    env = {"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "follow.py"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r'follow\.py", line 7, in follow\n .*\n(.*\n)?KeyError: \'no such metric\'\n', done.stderr)
    assert f"the callback {named} raised this and ended the run; correct it, then set resume='auto'" in done.stderr
    # its step is not taken again
    again = fovea.GRPO(settings=of_shapes(**{"checkpoint.every_steps": 1}), resume="auto")
    assert [row["step"] for row in again.train().metrics] == [1, 2]


async def later(record: fovea.StepRecord) -> None: ...


class Follows:
    def on_step_end(self, args: object, state: object, control: object) -> None: ...


@table(
    ("given", "message"),
    [
        ({"on_step": later}, r"on_step=.*later is async, but a run does not await it; write def on_step\(record\)"),
        ({"on_eval": lambda: None}, r"on_eval=.* takes \(\), but is called with one record; write def on_eval\(record"),
        ({"on_step": Follows()}, r"on_step=<.*Follows.*> is not a function; write def on_step\(record\)"),
        ({"on_step": Follows}, r"on_step=<class.*Follows.*> is not a function; write def"),
        ({"callbacks": [Follows()]}, r"callbacks is not a setting here: .*on_step=function and on_eval=function"),
    ],
)
def test_what_is_no_callback_is_told(given: Mapping[str, Callable[..., Any]], message: str) -> None:
    with pytest.raises(fovea.FoveaError, match=message):
        fovea.GRPO(model={"tiny": {}}, environment="shapes", **given)  # type: ignore[arg-type]


def test_the_pictures_of_a_run_are_in_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    given = rows()
    for row in given[::2]:
        row["photo"] = row["photo"].resize((64, 64))
    monkeypatch.setattr(recorded, "TRACKER_MAX_PIXELS", 32 * 32)
    run = of_rows(given, log={"tensorboard": True, "progress": False, "samples_every_steps": 2}).train()
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("reward")] == pytest.approx([row["reward"] for row in run.metrics])
    assert events.Tags()["images"] == ["samples/1", "samples/2"]
    images, texts = events.Images("samples/1"), events.Tensors("samples/1/text_summary")
    assert [image.step for image in images] == [text.step for text in texts] == [1, 2]
    for image, text in zip(images, texts, strict=True):
        question, truth, reward = text.tensor_proto.string_val[0].decode().split("\n", 2)
        shown = Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB")
        assert shown.size == (32, 32)
        np.testing.assert_array_equal(np.asarray(shown), np.asarray(picture(truth.removeprefix("    truth: "))))
        assert question.strip() in {row["question"] for row in given}
        assert reward.startswith("    reward ")


@pytest.mark.slow
def test_a_script_under_torchrun_trains_as_in_one_process(tmp_path: Path) -> None:
    printed = run_on(2, "tests.api.trained_script", str(tmp_path / "two"))
    after = [line for line in printed.splitlines() if line.startswith("after train")]
    assert after == ["after train, rank 0 steps 2"], "the rest of the script runs once"
    called = [line for line in printed.splitlines() if line.startswith("callback")]
    assert called == ["callback, rank 0 step 1", "callback, rank 0 step 2"]
    two = fovea.load_run("two")
    assert two.summary is not None
    one = of_rows(run_dir="one", threads=1).train()
    for mine, theirs in zip(one.metrics, two.metrics, strict=True):
        for name in ("reward", "accuracy", "response_tokens_mean"):
            assert theirs[name] == pytest.approx(mine[name]), name


CALLS: list[str] = []


def hint(place: int) -> str:
    """Look the answer up.

    Args:
        place: Which.
    """
    CALLS.append(f"call {place}")
    return "red"


class Grader:
    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        right = float(turns[-1].text.strip() == task.answer)
        return Score(reward=right, accuracy=right)


class Riddle(Environment):
    """The same question in all rows; its answer is to be looked up."""

    max_turns = 1
    graders = (Grader(),)

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(id=f"{split}/{number}", question="Answer?", answer="red") for number in range(8)]

    def prompt(self, task: Task) -> Sequence[Message]:
        return [Message(role="user", parts=(task.question,))]

    def target(self, task: Task) -> str:
        return task.answer

    def demonstration(self, task: Task) -> Sequence[str]:
        return [demonstrated_call("hint", {"place": 1}), "red"]


def test_a_function_is_called_as_demonstrations_ask_for_it() -> None:
    CALLS.clear()
    warmup = {"max_steps": 1, "check_every_steps": 1, "batch_size": 2}
    settings = {**SETTINGS, "max_steps": 1, "warmup": warmup, "environment.max_tool_turns": 1}
    trainer = fovea.GRPO(environment=Riddle(), tools=[hint], run_dir="run", settings=settings)
    assert trainer.config.environment.tools == (f"python:{__name__}.hint",)
    (step,) = trainer.train().metrics
    assert (CALLS, step["step"]) == (["call 1", "call 1"], 1)


def test_a_string_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^tools='zoom'"):
        fovea.GRPO(rows=rows(), reward=score, tools="zoom", settings=SETTINGS)
