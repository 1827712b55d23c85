"""Benchmarks read their published files, ask what lmms-eval asks and judge as their official scripts do."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fovea.cli.main import app
from fovea.commands.benchmarks import BENCHMARKS
from fovea.config.sections import Data
from fovea.models.render import Renderer
from fovea.wiring.images import make_opener
from fovea_gym.benchmarks import hallusionbench, mathverse, mathvista, mmmu
from fovea_gym.benchmarks.base import final_answer
from fovea_gym.benchmarks.environment import open_benchmark
from fovea_gym.errors import DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.types import ImageRef, Message
from gym_tests.chat_server import Endpoint, says
from gym_tests.grading import within_a_second
from gym_tests.tables import table
from tests.evaluation.benchmarks.made import ROWS, Row, cell, parquet, write
from tests.report.pages import Page
from tests.runs import QUICK, train_here
from tests.tiny_models import processor_of, tiny

HERE = Path(__file__).parent


def verdicts() -> Mapping[str, list[Row]]:
    cases = defaultdict[str, list[Row]](list)
    with gzip.open(HERE / "verdicts.jsonl.gz", "rt", encoding="utf-8") as lines:
        for case in map(json.loads, lines):
            cases[case["bench"]].append(case)
    return cases


def ours(case: Row) -> Any:
    row, response = case["row"], case["response"]
    match case["bench"]:
        case "mathvista":
            found = mathvista.quick_extraction(row, response)
            assert (found is None) == (case["gpt"] is not None), "GPT is asked where no rule of the script decides"
            return mathvista.verdict(row, case["gpt"] if found is None else found)
        case "mathverse":
            return mathverse.quick_match(row, response)
        case "mathvision" | "vstar" | "refcoco" | "screenspot" as name:
            return BENCHMARKS[name].is_right(row, response)
        case "mmmu" if row["question_type"] == "open":
            return mmmu.is_right_open(mmmu.truths(row), response)
        case "mmmu":
            picked = mmmu.picked_letter(mmmu.options_of(row), response)
            return None if picked is None else picked == row["answer"]
        case "yes_or_no":
            return hallusionbench.yes_or_no(response) or "Unknown"
        case _:
            right = [BENCHMARKS["hallusionbench"].is_right(*each) for each in zip(row, response, strict=True)]
            assert right == case["right"]
            scores = BENCHMARKS["hallusionbench"].scores(zip(row, map(float, right), strict=True))
            return {name: pytest.approx(score.mean) for name, score in scores.items()}


@pytest.mark.parametrize("name", [*BENCHMARKS, "yes_or_no"])
def test_verdicts_are_those_of_the_official_scripts(name: str) -> None:
    cases = verdicts()[name]
    assert len(cases) >= (60 if name == "hallusionbench" else 500)
    assert name == "hallusionbench" or min(Counter(str(case["verdict"]) for case in cases).values()) > 100
    wrong = [case for case in cases if ours(case) != case["verdict"]]
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize(
    "response",
    [
        *('The answer is "' * 8_000, "OXED{" * 16_000, "1" * 15_000 + ",", "\\frac{" * 7_000, "(" * 40_000),
        *(r"\boxed{1²/3}", "no, " * 10_000),
    ],
    ids=lambda response: response[:15],
)
def test_every_answer_gets_its_verdict_in_time(name: str, response: str) -> None:
    for row in [part for each in ROWS[name]() for part in BENCHMARKS[name].rows(each)]:
        assert within_a_second(lambda row=row: BENCHMARKS[name].is_right(row, response)) in (True, False)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_prompts_are_those_of_lmms_eval(name: str, tmp_path: Path) -> None:
    asked = open_benchmark(BENCHMARKS[name], str(write(tmp_path, name)), RowAccess())
    theirs = json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))[name]
    # its task of HallusionBench has the rows with a picture only
    tasks = [task for task in asked.tasks("test") if task.images or name != "hallusionbench"]
    messages = [asked.prompt(task) for task in tasks]
    assert list(map(_parts, messages)) == theirs
    tiny_model = tiny("qwen3_vl")
    processor = processor_of(tiny_model, "qwen3_vl")
    render = Renderer(tiny_model.processor, make_opener(Data(), tmp_path))
    tokenizer = tiny_model.processor.tokenizer
    for ours, parts in zip(messages, theirs, strict=True):
        content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        assert render.prompt(ours).unexpanded_ids_U.tolist() == tokenizer(text)["input_ids"]


def _parts(messages: Sequence[Message]) -> list[Any]:
    """The parts of a prompt as the stored ones have them: texts, and the numbers of the row's images."""
    (message,), numbers = messages, iter(range(1, 9))
    return [{"image": next(numbers)} if isinstance(part, ImageRef) else part for part in message.parts]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with all benchmarks in data/."""
    for name in ROWS:
        write(tmp_path / "data" / name, name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def evaluated(*words: str) -> Result:
    return CliRunner().invoke(app, ["eval", *words])


def test_the_gold_answers_are_right_and_the_table_has_the_published_figures(folders: Path) -> None:
    files = ("--json", "all.json", "--html", "all.html")
    said = evaluated("gold", "constant:No", f"bench={','.join(ROWS)}", "--quiet", *files).output
    saved = json.loads((folders / "all.json").read_text(encoding="utf-8"))["benchmarks"]
    page = Page(folders / "all.html")
    for name, made in ROWS.items():
        scores = saved[name]["scores"]
        assert all(score["mean"] == 1 for score in scores["gold"].values()), (name, scores)
        rows = [part for row in made() for part in BENCHMARKS[name].rows(row)]
        assert len(saved[name]["rows"]) == len(rows) == next(iter(scores["gold"].values()))["n"]
        assert re.search(rf"{name}.* gold .*100\.0 \[", said), said
        assert f"fovea eval gold constant:No bench={name}" in said
        for published in saved[name]["published"]:
            assert f"{name}: published for {published['model']}, {published['source']}" in said
        answers = page.value(f"answers/1/{list(ROWS).index(name)}")
        assert (answers["name"], answers["rows"][0]["answers"][0]["turns"][-1]["text"]) == (name, "No")
    assert saved["hallusionbench"]["scores"]["constant:No"]["aAcc"]["mean"] == pytest.approx(1 / 3)
    assert page.value("runs")[0]["evaluations"] == list(ROWS)
    headline = {stat["label"]: stat for stat in page.value("summary/0/0")["headline"]}
    assert headline["mathvista"]["value"].startswith("100.0 [")
    assert headline["hallusionbench qAcc"]["note"].startswith("28.79 published for GPT-4V")


def test_parquet_of_the_hub_and_files_of_the_authors_are_the_same_rows(tmp_path: Path) -> None:
    rows = {name: ROWS[name]() for name in ("mathvision", "hallusionbench")}
    for name, column in (("mathvision", "decoded_image"), ("hallusionbench", "image")):
        for place, row in enumerate(rows[name]):
            row[column] = cell(place)
    parquet(tmp_path / "v/data/test-00000-of-00001.parquet", rows["mathvision"])
    parquet(tmp_path / "h/data/image-00000-of-00001.parquet", rows["hallusionbench"][1:])
    for name, folder, first in (("mathvision", "v", 0), ("hallusionbench", "h", 1)):
        paths = (tmp_path / folder, write(tmp_path / name, name))
        hub, authors = (open_benchmark(BENCHMARKS[name], str(path), RowAccess()).tasks("test") for path in paths)
        of_hub, of_authors = (
            [(task.question, task.answer, task.kind, len(task.images)) for task in tasks]
            for tasks in (hub, authors[first:])
        )
        assert of_hub == of_authors


@table(
    ("words", "message"),
    [
        (["bench=mathvist"], "bench=mathvist: no such benchmark; did you mean mathvista?"),
        (
            ["bench=xyz"],
            "bench=xyz: no such benchmark; the benchmarks are mathvista, mathverse, mathvision, mmmu, hall",
        ),
        (["bench="], "bench= names no benchmark; the benchmarks are mathvista"),
        (["bench.mmmu=data/mmmu"], "bench.mmmu gives the path of mmmu, but bench does not name it; add bench=mmmu"),
        (["bench=mmmu", "bench.mmmu=nowhere"], "bench.mmmu: no such file nowhere; correct the path (the folder holds"),
        (
            ["bench=mmmu", "bench.mmmu=empty"],
            "empty holds no */validation-*.parquet or data/validation-*.parquet; give",
        ),
        (["bench=mmmu", "bench.mmmu=data/mathverse/testmini.parquet"], "no column id, options, image_1 (its columns"),
        (
            ["bench=mathvision", "bench.mathvision=bad.jsonl"],
            "bad.jsonl line 1: not a row of mathvision (KeyError: 'B')",
        ),
        (["bench=mmmu", "bench=mathvista"], "given twice; write one list: bench=mathvista,mmmu"),
        (["benchmark=mmmu"], "benchmark: no such setting; benchmarks are named by bench="),
        (["bench=mmmu", "bench.mmmu="], "bench.mmmu= is empty; leave it out for data/mmmu"),
        (["bench=mmmu", "environment.prompt_key=text"], "environment.prompt_key=text: a benchmark has its own rows"),
        (["bench=mmmu", "bench.mmmu=deep.jsonl"], "not a row of mmmu (ValueError: a list that is nested too deeply)"),
        (["bench=mmmu", "bench.mmmu=long.jsonl"], "not a row of mmmu (ValueError: a list of 200001 characters)"),
        (["bench=mmmu", "--split", "dev"], "--split dev: benchmarks have only test rows; leave --split out"),
        (["bench=mmmu", "majority"], "mmmu has no train rows whose answers to count; compare with gold or constant"),
    ],
)
def test_mistakes_are_one_line_with_the_fix(folders: Path, words: list[str], message: str) -> None:
    (folders / "empty").mkdir(exist_ok=True)
    bad = ROWS["mathvision"]()[1] | {"options": ["only A"]}
    (folders / "bad.jsonl").write_text(json.dumps(bad) + "\n", encoding="utf-8")
    for name, options in (("deep", "-" * 9_000 + "1"), ("long", "-" * 200_000 + "1")):
        row = {key: value for key, value in ROWS["mmmu"]()[0].items() if not key.startswith("image_")}
        row |= {"image_1": None, "options": options}
        (folders / f"{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    result = evaluated("gold", *words, "--quiet")
    assert (result.exit_code, message in " ".join(result.output.split())) == (2, True), result.output


def test_without_a_download_the_command_for_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = " ".join(evaluated("gold", "bench=mathvista").output.split())
    assert "there is no folder data/mathvista; `hf download AI4Math/MathVista --repo-type dataset --local-dir" in said


def test_a_judge_overrules_the_rule(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(says("Score: 10"))
    judge = [f"judge.url={endpoint.url}", "judge.model=tiny", "second_opinion=wrong"]
    words = ["constant:It is 55 degrees", "bench=mathverse", "--quiet", "--json", "judged.json"]
    evaluated(*words, *judge)
    scores = json.loads((folders / "judged.json").read_text(encoding="utf-8"))["benchmarks"]["mathverse"]["scores"]
    assert scores["constant:It is 55 degrees"]["accuracy"]["mean"] == 1
    assert len(endpoint.requests) == 2
    endpoint.server.shutdown()


def test_a_run_that_stopped_after_its_answers_writes_whole_ones_here(folders: Path) -> None:
    """No benchmark says where an answer ends."""
    settings = [*QUICK, "max_steps=1", "rollout.stop_after_answer=true", "rollout.max_new_tokens=2"]
    train_here("shapes", folders / "run", *settings)
    assert evaluated("run", "bench=mathvista", "--quiet").exit_code == 0


@table(
    ("response", "answer"),
    [("It is 4.", "It is 4"), ("So the answer is **B**.", "B"), (r"\boxed{1} no, \boxed{2}", "2"), ("$5$", "5")],
)
def test_the_answer_that_a_response_ends_with(response: str, answer: str) -> None:
    assert final_answer(response) == answer


@table(
    ("cells", "message"),
    [
        ({"image": {"bytes": b"no picture", "path": None}}, "not a row of refcoco"),
        ({"image": {"bytes": None, "path": "one.jpg"}}, r"not a row of refcoco \(TypeError: image is not a picture"),
        ({"bbox": [1.0, 2.0]}, r"not a row of refcoco \(ValueError: bbox is not a box of four numbers"),
    ],
)
def test_a_row_of_refcoco_without_picture_or_box_is_named(cells: Row, message: str, tmp_path: Path) -> None:
    rows = [ROWS["refcoco"]()[0] | cells]
    with pytest.raises(DataError, match=message):
        open_benchmark(BENCHMARKS["refcoco"], str(write(tmp_path, "refcoco", rows)), RowAccess())
