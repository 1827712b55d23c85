"""`fovea grade` on rows, on rows that cannot be graded, and against what a run scores."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fovea.cli import main as cli
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.settings.environments import ShapesEnvironment
from gym_tests.grading import scored
from gym_tests.tables import table


def grade(name: str, file: Path, *options: str) -> Result:
    return CliRunner().invoke(cli.app, ["grade", name, str(file), *options])


def graded(tmp_path: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows that come back, and the summary."""
    file, out = tmp_path / "answers.jsonl", tmp_path / "graded.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = grade(name, file, "--out", str(out))
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()], json.loads(result.stdout)


def test_rows_come_back_with_score_parts_and_reason(tmp_path: Path) -> None:
    given = {"id": "é", "prediction": r"so \boxed{12}", "truth": "12", "score": "an old one"}
    rows, summary = graded(tmp_path, "geo3k", [given, given | {"prediction": r"\boxed{13}"}])
    parts = {"answer": 1.0, "format": 1.0}
    assert rows[0] == given | {"score": 1.0, "parts": parts, "reason": "boxed '12' equals '12'"}
    assert (rows[1]["score"], rows[1]["reason"]) == (0.0, "boxed '13' is not '12'")
    assert summary == {"rows": 2, "graded": 2, "mean_score": 0.5, "ungraded": {}}


BAD_LINES = [
    (b"not json", "row_unreadable"),
    (b'{"prediction": "5", "truth": NaN}', "row_unreadable"),
    (b'{"prediction": "5", "truth": "5", "x": 1e999}', "row_unreadable"),
    (b'{"prediction": "\xff", "truth": "5"}', "row_unreadable"),
    (b"[" * 100_000, "row_unreadable"),
    (b"[1, 2]", "row_unreadable"),
    (b'{"truth": "5"}', "prediction_missing"),
    (b'{"prediction": null, "truth": "5"}', "prediction_missing"),
    (b'{"prediction": ["5"], "truth": "5"}', "prediction_kind"),
    (b'{"prediction": "5"}', "answer_missing"),
    (b'{"prediction": "5", "truth": " "}', "answer_missing"),
    (b'{"prediction": "5", "truth": true}', "answer_kind"),
    (b'{"prediction": "5", "truth": [["5"]]}', "answer_kind"),
    (rb'{"prediction": "5", "truth": "\ud800"}', "text_damaged"),
    (rb'{"prediction": "5", "truth": "{5"}', "answer_never_right"),
    (rb'{"prediction": "5", "truth": "degrees"}', "answer_never_right"),
]


def test_what_cannot_be_graded_is_named_and_never_0(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    good = rb'{"prediction": "\\boxed{5} \ud800", "truth": "5"}'
    file.write_bytes(b"\n".join([b"\xef\xbb\xbf" + good, b"", *(line for line, _ in BAD_LINES)]))
    result = grade("geo3k", file)
    assert result.exit_code == 0, result.output
    first, *rest = map(json.loads, result.stdout.splitlines())
    assert (first["score"], first["prediction"]) == (1.0, "\\boxed{5} \ud800")
    summary = json.loads(result.stderr)
    assert (summary["rows"], summary["graded"], summary["mean_score"]) == (1 + len(BAD_LINES), 1, 1.0)
    for number, (row, (_, reason)) in enumerate(zip(rest, BAD_LINES, strict=True), start=3):
        told = row["reason"]
        assert (row["score"], told.startswith(f"line {number}: "), "on_bad_row" in told) == (None, True, False)
        assert number in summary["ungraded"][reason]["first_lines"]


@table(
    ("truth", "reason"),
    [
        ("France", "answer_kind"),
        ({}, "answer_missing"),
        ({"country": "Atlantis"}, "place"),
        ({"lat": 95, "lon": 1}, "place"),
        ({"lat": 5}, "place"),
    ],
)
def test_truths_that_are_no_place(tmp_path: Path, truth: object, reason: str) -> None:
    pytest.importorskip("pycountry")
    good = {"prediction": "Paris, France", "truth": {"country": "FR", "city": "Paris", "lat": 48.86, "lon": 2.35}}
    rows, summary = graded(tmp_path, "geospot", [good, {"prediction": "France", "truth": truth}])
    assert rows[1]["score"] is None
    assert summary["ungraded"] == {reason: {"rows": 1, "first_lines": [2]}}


def test_multiple_choice_and_several_annotators(tmp_path: Path) -> None:
    choice = {"options": ["cat", "dog"]}
    given = [
        {"prediction": "B", "truth": "dog", **choice},
        {"prediction": "the dog", "truth": "B", **choice},
        {"prediction": "A", "truth": "dog", **choice},
        {"prediction": "2", "truth": ["2", "2", *["3"] * 8]},
        {"prediction": "A", "truth": "bird", **choice},
    ]
    rows, _ = graded(tmp_path, "vqa", given)
    # of ten leave-one-out subsets two hold one other 2 and eight hold two: (2 x 1/3 + 8 x 2/3) / 10
    assert [row["score"] for row in rows] == [1.0, 1.0, 0.0, pytest.approx(0.6), None]


def test_rare_words_of_captions_are_those_of_the_file(tmp_path: Path) -> None:
    truths = [["a red dog runs", "a dog"], "a blue cat sits", "a green bird flies"]
    answers = ["a red dog runs", "a cat", "a"]
    answered = [{"prediction": answer, "truth": truth} for answer, truth in zip(answers, truths, strict=True)]
    rows, _ = graded(tmp_path, "caption", [*answered, {"truth": []}])
    assert rows[0]["score"] == 1.0
    assert 0 < rows[1]["score"] < 1
    assert rows[2]["parts"]["cider"] == 0.0  # a word of every truth is worth nothing
    assert rows[3]["score"] is None


def test_scores_are_those_of_a_run(tmp_path: Path) -> None:
    environment = Shapes(ShapesEnvironment(), 0)
    tasks = environment.tasks("test")[:8]
    texts = [environment.target(task) if n % 2 else rf"a \boxed{{{task.answer}}}" for n, task in enumerate(tasks)]
    given = [{"prediction": text, "truth": task.answer} for task, text in zip(tasks, texts, strict=True)]
    rows, _ = graded(tmp_path, "shapes", given)
    scores = [scored(environment.graders, task, text) for task, text in zip(tasks, texts, strict=True)]
    assert [(row["score"], row["parts"]) for row in rows] == [(score.reward, dict(score.parts)) for score in scores]
    assert {row["score"] for row in rows} == {0.0, 1.0}


def test_files_that_cannot_serve_and_environments_without_a_grader(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    assert "no such file" in grade("geo3k", file).stderr
    for content, problem in (("", "it has no rows"), ("{}\n", "line 1: prediction is missing")):
        file.write_text(content, encoding="utf-8")
        result = grade("geo3k", file)
        told = f"none of {len(content.splitlines())} rows could be graded; the last problem: {problem}"
        assert (result.exit_code, result.stderr.splitlines()) == (2, [f"error: {file}: {told}"])
    file.write_text('{"prediction": "5", "truth": "5"}\n', encoding="utf-8")
    assert "is the file that is graded" in grade("geo3k", file, "--out", str(file)).stderr
    assert "grading captions reads it twice" in grade("caption", Path("/dev/null")).stderr
    assert file.read_text(encoding="utf-8").startswith("{")
    result = grade("nope", tmp_path / "answers.jsonl")
    told = "Invalid value for 'ENV': 'nope' is not one of 'geo3k', 'vqa'"
    assert (result.exit_code, told in " ".join(result.stderr.split())) == (2, True)


ROW = b'{"prediction": "\\\\boxed{4}", "truth": "4"}\n'
COMMAND = [sys.executable, "-m", "fovea", "grade", "geo3k"]


def test_a_dash_is_stdin_and_a_reader_that_has_read_enough_ends_the_command_quietly(tmp_path: Path) -> None:
    """As `| head -1` does; the rows are more than a pipe holds."""
    (tmp_path / "answers.jsonl").write_bytes(ROW * 3000)
    command = subprocess.Popen([*COMMAND, tmp_path / "answers.jsonl"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert json.loads(command.stdout.readline())["score"] == 1.0  # type: ignore[union-attr]
    command.stdout.close()  # type: ignore[union-attr]
    assert command.communicate()[1] == b""
    assert command.wait() == 1
    done = subprocess.run([*COMMAND, "-"], input=ROW, capture_output=True, check=True)
    assert json.loads(done.stdout)["score"] == 1.0
