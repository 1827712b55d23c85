"""Environments of a run: rows given from Python, the trial of the reward, tools of the parts of a mixture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.errors import ModelError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.run.context import Run
from fovea.wiring.environment import make_environment
from fovea.wiring.given import rows_as_files
from fovea.wiring.images import make_opener
from fovea.wiring.run import build
from fovea.wiring.trial_score import remarks_on_answers, remarks_on_shares, try_reward
from fovea_gym.environments.base import Split
from fovea_gym.errors import ConfigError, FoveaError, ScoreError
from fovea_gym.rows.rows import InMemory
from fovea_gym.tools.session import demonstrated_call
from fovea_gym.types import ImageRef, Message, Turn
from fovea_gym.utils.event_loop import wait_for
from gym_tests.environments.files import row
from gym_tests.grading import score_in_run
from gym_tests.images import png
from gym_tests.tables import table
from tests.tiny_models import save, tiny
from tests.tools.importer.runs_of_others import VERL as VERL_RUN
from tests.wiring.small import run_of

QUESTION = {"question": "<image>Which?", "answer": "red"}
PLACE = {"country": "France", "city": "Paris", "lat": 48.86, "lon": 2.35}


def config_of(name: str, **settings: object) -> Config:
    environment = {"name": name, "train_files": [], "test_files": []} if name != "shapes" else {"name": name}
    return Config.model_validate({"model": {"tiny": {}}, "environment": environment, **settings})


@pytest.mark.parametrize(
    ("name", "row"), [("geo3k", QUESTION), ("vqa", QUESTION), ("caption", QUESTION), ("geospot", PLACE)]
)
def test_every_environment_of_rows_takes_them_from_python(name: str, row: Mapping[str, object], tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "b.png")
    rows = pd.DataFrame([{**row, "image": "a.png"}, {**row, "image": "b.png"}])
    data = {"image_root": str(tmp_path), "cache_dir": str(tmp_path / "cache")}
    config = config_of(name, data=data, run_dir=str(tmp_path / "run"))
    with rows_as_files(config, {"train": rows, "dev": rows, "test": rows}) as written:
        written.move_into(tmp_path / "run")
    environment = make_environment(written.config).environment
    open_image = make_opener(config.data, tmp_path)
    tasks = environment.tasks("train")
    assert len(tasks) == len(environment.tasks("dev")) == len(environment.tasks("test")) == 2
    colours = [open_image(ref).getpixel((0, 0)) for task in tasks for ref in task.images]
    assert colours == [(255, 0, 0), (0, 0, 255)]
    assert environment.target(tasks[1])


def test_a_run_of_rows_from_python(tmp_path: Path) -> None:
    """`build` writes them into the run folder, and a file may stand for one of the splits."""
    rows = [{**QUESTION, "image": Image.new("RGB", (32, 32), colour)} for colour in ("red", "blue", "green")]
    Image.new("RGB", (32, 32)).save(tmp_path / "x.png")
    (tmp_path / "test.csv").write_text("question,answer,image\n<image>Which?,red,x.png\n")
    config = config_of("vqa", run_dir=str(tmp_path / "run"), log={"tensorboard": False, "progress": False})
    environment = config.environment.model_copy(update={"test_files": (str(tmp_path / "test.csv"),)})
    run = build(config.model_copy(update={"environment": environment}), frames={"train": pd.DataFrame(rows)})
    assert [len(source) for source in (run.sources.train, run.sources.dev, run.sources.test)] == [2, 1, 1]
    prompted = run.sources.train.get(1)
    assert prompted is not None
    assert len(prompted.prompt.images) == 1


SEVERAL = pd.DataFrame([["<image>Which?", "red", "blue"]], columns=["question", "answer", "answer"])


@table(
    ("name", "frames", "problem"),
    [
        ("shapes", {"train": [QUESTION]}, r"rows are given, but environment.name=shapes takes none; choose rows"),
        ("vqa", {"validation": [QUESTION]}, "frames: no split is called validation; name them train, dev, test"),
        ("vqa", {"train": SEVERAL}, "rows has several columns called 'answer', of which one would be read; rename or"),
    ],
)
def test_rows_that_cannot_be_read(name: str, frames: Mapping[Split, InMemory], problem: str) -> None:
    with pytest.raises(FoveaError, match=problem), rows_as_files(config_of(name), frames):
        pass


@pytest.mark.parametrize(
    ("row", "settings", "is_said"),
    [
        ({"question": "?", "solution": "4"}, (), True),  # TRL's name
        ({"question": "?", "solution": "4"}, ("environment.answer_key=solution",), False),
        ({"question": "?", "answer": "4"}, (), False),
        ({"question": "?", "answer": {"lat": 1.0}}, (), False),  # for the reward to find in the row
    ],
)
def test_a_reward_whose_rows_have_no_answers_is_told_so(
    row: dict[str, object], settings: tuple[str, ...], is_said: bool, tmp_path: Path
) -> None:
    """`task.answer in text` would be right for every text."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    files = [f"environment.{split}_files=[{tmp_path / 'rows.jsonl'}]" for split in ("train", "test")]
    own = tmp_path / "own.py"
    own.write_text("def right(task, text, images):\n    return float(task.answer in text)\n")
    config = load_config([], ["model.tiny={}", "environment.name=rows", *files, f"reward={own}:right", *settings])
    graded = make_environment(config)
    with closing(graded.grading):
        said = "".join(remarks_on_answers(graded))
    parts = ("is called answer or reward_model, so task.answer is empty in the", "the columns are question, solution")
    assert [part in said for part in parts] == [is_said] * 2
    assert bool(said) is is_said


def test_shares_of_a_part_that_became_larger_are_said_with_their_numbers(tmp_path: Path) -> None:
    rows = [{"problem": str(row), "answer": "1", "images": [f"{row % 3}.png"]} for row in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"name": "vqa", "train_files": [str(tmp_path / "rows.jsonl")], "test_share": 0.2, "dev_share": 0.05}
    parts = {"files": {"environment": files}, "scenes": {"environment": {"name": "shapes"}}}
    environment = json.dumps({"name": "mixture", "parts": parts})
    config = load_config([], ["model.tiny={}", f"environment={environment}", "warmup=null"])
    graded = make_environment(config)
    with closing(graded.grading):
        said = list(remarks_on_shares(config, graded))
    numbers = "of 60 rows holds out 20 and leaves 20 to train on"
    shares = ("test_share=0.2", "dev_share=0.05")
    expected = [f"environment.parts.files.environment.{share} {numbers}" for share in shares]
    assert [line.partition(", since")[0] for line in said] == expected


SPLITS = ("train", "dev", "test")
OPENS = "def score(task, text, images):\n    images[0].load()\n    return float(task.answer in text)\n"
VERL = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return float({})\n"


def remarks(folder: Path, code: str, rows: list[dict[str, Any]], *words: str) -> list[str]:
    (folder / "mine.py").write_text(code, encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    files = [f"environment.{split}_files=['{folder}/rows.parquet']" for split in SPLITS]
    overrides = ["model.tiny={}", "environment.name=geo3k", *files, f"reward={folder}/mine.py:score", *words]
    config = load_config([], overrides)
    graded = make_environment(config)
    with closing(graded.grading):
        return try_reward(graded, make_opener(config.data, folder))


def rows_after(**first: object) -> list[dict[str, Any]]:
    rows = [{**row("How many?", "3"), **first}, *(row("How many?", str(n)) for n in range(4, 9))]
    return [{**each, "data_source": "made"} for each in rows]


@table(
    "first",
    [
        {"images": [{"bytes": png((9, 9, 9), 32)[:60], "path": None}]},
        {"images": [{"bytes": None, "path": "missing.png"}]},
        {"answer": None},
    ],
)
def test_a_first_row_that_cannot_be_used_is_left_to_the_run(first: dict[str, object], tmp_path_factory: Any) -> None:
    assert remarks(tmp_path_factory.mktemp("rows"), OPENS, rows_after(**first), "data.on_bad_row=skip") == []


def test_a_reward_that_cannot_score_the_gold_answer_is_an_error_or_a_remark(tmp_path: Path) -> None:
    code = "def score(task, text, images):\n    raise KeyError('no')\n"
    with pytest.raises(ScoreError, match="raised KeyError: 'no'"):
        remarks(tmp_path, code, rows_after())
    for policy in ("drop", "drop_completion"):
        (said,) = remarks(tmp_path, code, rows_after(), f"reward_on_failure={policy}")
        assert said.startswith("your reward gives the gold answer no score: train/0: ")
    # no row can be used
    (said,) = remarks(tmp_path, OPENS, [row("?", answer) for answer in ("", None, None)], "data.on_bad_row=skip")
    assert "was not tried" in said


@table(
    ("code", "said"),
    [
        (VERL.format('solution_str == "?"'), "your reward gives the gold answer 0 (train/0: "),
        (VERL.format('2 * (solution_str == "?") - 1'), "your reward gives the gold answer -1 (train/0: "),
        (VERL.format('f"boxed{{{ground_truth}}}" in solution_str'), None),
        (VERL.format('solution_str.endswith(f"</think><answer>{ground_truth}</answer>")'), None),
        (VERL.format("-(ground_truth not in solution_str)"), None),  # 0 is the best
    ],
)
def test_a_gold_answer_without_a_reward_is_told(code: str, said: str | None, tmp_path_factory: Any) -> None:
    found = remarks(tmp_path_factory.mktemp("rows"), code, rows_after())
    assert [each.startswith(str(said)) for each in found] == ([] if said is None else [True])


def test_the_first_line_of_a_file_may_be_damaged(tmp_path: Path) -> None:
    """Its cells tell in which column the images are; those of the next row do, too."""
    lines = '{"problem": \n' + '{"problem": "3?", "answer": "3"}\n' * 3
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
    files = [f"environment.{split}_files=['{tmp_path}/rows.jsonl']" for split in SPLITS]
    config = load_config([], ["model.tiny={}", "environment.name=geo3k", *files, "data.on_bad_row=skip"])
    assert len(make_environment(config).environment.tasks("train")) == 4


def test_an_imported_recipe_of_verl_rewards_the_gold_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "hiyouga/geometry3k" and extra_info == {"index": 1}
    return {"score": float("boxed{" + ground_truth + "}" in solution_str), "pred": solution_str}
"""
    Path("rewards.py").write_text(code, encoding="utf-8")
    Path("run.sh").write_text(VERL_RUN, encoding="utf-8")
    words = ["import-config", "run.sh", "custom_reward_function.path=rewards.py", "--environment", "geo3k"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    Path("recipe.yaml").write_text(done.stdout, encoding="utf-8")
    asked = row("", "")["images"]
    of_row = {"data_source": "hiyouga/geometry3k", "extra_info": {"index": 1}, "images": asked}
    prompt, truth = [{"role": "user", "content": "<image>How many?"}], {"style": "rule", "ground_truth": "5"}
    rows = [{**of_row, "prompt": prompt, "reward_model": truth} for _ in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    config = load_config([Path("recipe.yaml")], [f"environment.{split}_files=[rows.parquet]" for split in SPLITS])
    assert config.rewards == {"reward": ("rewards.py:compute_score",)}
    graded = make_environment(config)
    assert try_reward(graded, make_opener(config.data, tmp_path)) == []
    task = graded.environment.tasks("train")[0]
    rewards = [score_in_run(graded.grading, task, rf"So \boxed{{{x}}}.").reward for x in (5, 6)]
    assert rewards == [1, 0]


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
    shown = "{%- if part.type == 'image'"
    file.write_text(written.replace(f"{shown} -%}}", f"{shown} and message.role != 'tool' -%}}"))
    assert file.read_text() != written
    settings = {"environment": {**SCENES, "tools": ["zoom"], "max_tool_turns": 1}, "model": {"path": str(folder)}}
    with pytest.raises(ModelError, match=r"environment.tools: zoom return pictures, which the chat template of .*"):
        run_of(tmp_path / "run", **settings)
