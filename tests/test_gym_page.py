"""docs/gym.md as it stands: its blocks run, with a real step of TRL, and its commands."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.trl_side import ImageProcessor
from fovea_gym.__main__ import main
from fovea_gym.environments.custom.signatures import called_by_name
from fovea_gym.environments.geo3k import Geo3kGrader
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.making import make
from fovea_gym.settings.environments import Geo3kEnvironment
from fovea_gym.trainers import as_easyr1, as_trl, as_verl, to_dataset
from fovea_gym.types import Task, Turn
from gym_tests.tables import table
from tests.runs import ROOT, run_program
from tests.tiny_models import tiny

PAGE = (ROOT / "docs" / "gym.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    """The names that the page leaves to its reader."""
    parts = tiny("qwen3_vl")
    tokenizer = parts.processor.tokenizer
    tokenizer.padding_side = "left"
    special = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4, "max_steps": 1}
    quiet = {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    sampling = {"generation_kwargs": {"suppress_tokens": special}}
    args = GRPOConfig(output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, **sizes, **sampling, **quiet)
    processor = ImageProcessor(parts.processor.image_processor, tokenizer, parts.processor.chat_template)
    return {"model": parts.network, "processor": processor, "args": args}


def test_the_blocks_of_the_page_run_and_trl_takes_a_step(names: dict[str, Any], folder: Path) -> None:
    for block in BLOCKS:
        exec(compile(block, "gym.md", "exec"), names)
    trainer = names["trainer"]
    assert isinstance(trainer, GRPOTrainer)
    assert "rewards/Shapes/mean" in trainer.state.log_history[0]
    read = load_dataset("parquet", data_files=str(folder / "train.parquet"), split="train")
    assert isinstance(read, Dataset)
    row = read[0]
    assert row["prompt"][-1]["content"].count("<image>") == len(row["images"]) == 1
    assert row["reward_model"] == {"style": "rule", "ground_truth": row["answer"]}


def test_trl_scores_the_completions_of_each_row_by_its_own_task() -> None:
    environment = make("frozen_lake", train_size=4)
    rows = to_dataset(environment, rows=4)
    reward = as_trl(environment)
    answers = [environment.demonstration(environment.tasks("train")[index])[0] for index in range(4)]
    scores = reward(completions=answers, **{name: list(rows[name]) for name in rows.column_names if name != "prompt"})
    solved = [len(environment.demonstration(environment.tasks("train")[index])) == 1 for index in range(4)]
    assert scores == [1.02 if each else 0.02 for each in solved]


def test_trl_reads_the_last_message_of_a_completion() -> None:
    reward = as_trl("vqa")
    said = [{"role": "assistant", "content": content} for content in ("no", [{"type": "text", "text": "yes"}])]
    scored = reward(completions=[said], answer=["yes"], prompts=[[]], completion_ids=[[1]], trainer_state=None)
    assert (scored, reward.__name__) == ([1.0], "vqa")


GEO3K = Geo3kGrader(Geo3kEnvironment(train_files=("none.parquet",), test_share=0.1, format_weight=0.25))


@pytest.mark.parametrize(("text", "reward"), [(r"\boxed{3}", 1.0), (r"\boxed{4}", 0.25), ("3", 0.0)])
def test_the_forms_score_as_the_grader_and_are_read_by_fovea(text: str, reward: float) -> None:
    verl, easyr1 = as_verl(GEO3K), as_easyr1(GEO3K)
    given = verl("source", text, "3", {"index": 0}, reward_router_address=None)
    assert (given["score"], given["acc"]) == (reward, float(reward == 1))
    assert easyr1([{"response": text, "ground_truth": "3", "response_length": 4}])[0]["overall"] == reward
    assert as_trl(GEO3K)(completions=[text], answer=["3"]) == [reward]
    for function in (verl, easyr1, as_trl(GEO3K)):
        ours = called_by_name(function, "theirs")
        assert ours is not None
        found = ours(Task(id="a", question="", answer="3", row={"data_source": None, "extra_info": None}), text, ())
        assert (found["reward"] if isinstance(found, dict) else found) == reward


def test_a_class_of_the_users_is_made_shown_and_scored(folder: Path) -> None:
    code = re.findall(r"```python\n(# dark_or_light.py.*?)```", (ROOT / "docs" / "own.md").read_text(), re.DOTALL)[0]
    (folder / "dark_or_light.py").write_text(code)
    assert main(["show", "own", "file=dark_or_light.py:DarkOrLight", "--rows", "2"]) == 0
    assert (folder / "own.html").read_text().count("<img") == 2
    made = make("dark_or_light.py:DarkOrLight")
    for given in (made, make("own", file="dark_or_light.py:DarkOrLight")):
        extra = list(to_dataset(given, "dev", rows=2)["extra_info"])
        assert as_trl(given)(completions=["dark", "light"], extra_info=extra) == [1.0, 0.0]
    assert main(["show", "dark_or_light.py:DarkOrLight", "--rows", "2", "--out", "again.html"]) == 0
    names: dict[str, Any] = {}
    exec(code, names)
    given = names["DarkOrLight"]()
    rows = to_dataset(given, "dev", rows=2)
    assert as_trl(given)(completions=["dark", "light"], extra_info=list(rows["extra_info"])) == [1.0, 0.0]


def test_verl_finds_the_row_of_an_environment() -> None:
    environment = make("sokoban", train_size=2)
    row = to_dataset(environment, form="verl", rows=2)[1]
    task = environment.tasks("train")[1]
    scored = as_verl(environment)("s", environment.target(task), row["reward_model"]["ground_truth"], row["extra_info"])
    assert scored["score"] > 0
    with pytest.raises(DataError, match="to_dataset"):
        as_verl(environment)("s", "Left", "Left", None)


@table(
    ("call", "error", "said"),
    [
        (lambda: as_easyr1(make("shapes")), ConfigError, "EasyR1"),  # type: ignore[arg-type]
        (lambda: as_trl("caption"), ConfigError, "caption"),
        (lambda: as_trl("geo3k")(completions=["3"], solution=["3"]), DataError, "answer_key"),
        (lambda: as_verl("geo3k")("s", "3", None), DataError, "missing"),
        (lambda: as_trl("geo3"), ConfigError, r"^there is no grader geo3; did you mean geo3k\?$"),  # type: ignore[arg-type]
        (
            lambda: to_dataset(make("shapes", train_size=2), form="ver"),  # type: ignore[arg-type]
            ConfigError,
            r"^form=ver is not a form of prompts; did you mean verl\?$",
        ),
    ],
)
def test_what_a_trainer_cannot_give_is_an_error(call: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_of_the_page_run(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "answers.jsonl").write_text(json.dumps({"prediction": r"\boxed{3}", "truth": "3"}) + "\n")
    program, module, name, *words = shlex.split(line)
    assert (program, module, name) == ("python", "-m", "fovea_gym")
    assert main(words) == 0
    written = capsys.readouterr().out
    if words[0] == "grade":
        assert json.loads(written)["mean_score"] == 1
    else:
        page = (folder / written.strip()).read_text(encoding="utf-8")
        assert page.count("<img") == page.count("<article>") == (8 if "--rows" in words else 12)


def test_a_page_escapes_cuts_and_counts_what_rows_hold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"problem": "<script>alert(1)</script>\u202e" + "a" * 10_000, "answer": "<b>3"},
        {"problem": "<image>What?", "images": ["nowhere.png"], "answer": "3"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["show", "geo3k", "train_files=[rows.jsonl]", "test_files=[rows.jsonl]", "dev_share=0", "--rows", "9999"]
    assert main(words) == 0
    page = (folder / capsys.readouterr().out.strip()).read_text(encoding="utf-8")
    assert not any(part in page for part in ("<script", "<b>", "\u202e"))
    assert len(page) < 10_000
    assert "nowhere.png" in page, "the reason that a row is not shown"
    assert page.count("<article>") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "nope"], "no environment nope"),
        (["show", "shape"], "did you mean shapes?"),
        (["show", "clocks:Clocks"], "did you mean clocks.py:Clocks?"),
        (["show", "clocks.txt:Clocks"], "choose one of"),
        (["grade", "geo3", "none.jsonl"], "there is no grader geo3; did you mean geo3k?"),
        (["show", "shapes", "lvel=2"], "lvel"),
        (["show", "shapes", "level"], "key=value"),
        (["grade", "geo3k", "none.jsonl"], "none.jsonl"),
    ],
)
def test_an_error_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "clocks.py").touch()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


class Sync:
    def score(self, task: Task, turns: Sequence[Turn]) -> float:
        return 1.0


@table("adapter", [as_trl, as_verl, as_easyr1])
@table(
    ("given", "problem"),
    [(7, "an object of type int"), (Sync(), "an object of type Sync"), (Sync, "the class Sync"), (print, "an object")],
)
def test_an_adapter_refuses_what_is_not_a_grader(adapter: Any, given: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{problem}.* is not a grader; give the name of one, such as geo3k, .*$"):
        adapter(given)


STARTED = """
import sys
from fovea_gym.__main__ import main

code = main(sys.argv[1:])
heavy = ("torch", "transformers", "fovea", "pyarrow", "httpx2", "datasets", "numpy")
print(code, *(name for name in heavy if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize(("words", "heavy"), [("grade geo3k answers.jsonl", []), ("show shapes", ["numpy"])])
def test_a_command_starts_without_what_it_does_not_need(words: str, heavy: list[str], folder: Path) -> None:
    (folder / "answers.jsonl").write_text(json.dumps({"prediction": r"\boxed{3}", "truth": "3"}) + "\n")
    path = {"PYTHONPATH": ":".join(sys.path)}
    done = run_program([sys.executable, "-c", STARTED, *words.split()], path, cwd=folder)
    assert done.stderr.splitlines()[-1].split() == ["0", *heavy]
