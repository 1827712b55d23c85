"""What the server of `fovea view` sends of a run: curves, samples, held-out answers, settings, console and remarks."""

from __future__ import annotations

import io
import json
import math
import os
import re
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from fovea.evaluation.json_file import write_answers
from fovea.evaluation.records import AnsweredRow, RecordedMessage, RecordedTurn
from fovea.metrics.log import JsonlSink, MetricsLog
from fovea.metrics.progress import Progress
from fovea.report.about import add_hint
from fovea.report.about_run import MAX_CONSOLE_BYTES, MAX_HINT_CHARS, MAX_HINTS
from fovea.report.curves import CHUNK_BYTES
from fovea.report.held_out import MAX_CHARS, MAX_PICTURES, MAX_ROWS, THUMBNAIL_PX, thumbnails, write_pictures
from fovea.report.page_files import PAGE_FILES, page_file
from fovea.report.viewed_run import ViewedRun
from fovea.view.server import make_app
from gym_tests.tables import table
from tests.records import said
from tests.report.folders import write_answers_of, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def client(folder: Path) -> TestClient:
    return TestClient(make_app([ViewedRun(folder)]), base_url="http://127.0.0.1:8377")


def test_facts_of_a_run_are_read_anew(client: TestClient, folder: Path) -> None:
    (run,) = client.get("/data/runs").json()
    assert (run["name"], run["step"], run["max_steps"], run["finished"]) == ("run", 5, 10, False)
    assert run["metrics"] == ["reward", "seconds/step", "reward/\\boxed{3}"]
    assert (run["entries"], run["newest_entry"]) == (3, 4)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "reward": 0.7, "entropy": 1.5}\n')
    (run,) = client.get("/data/runs").json()
    assert (run["step"], run["metrics"][-1]) == (6, "entropy")


def long_run(folder: Path, damaged: int | None = None) -> Path:
    """A run of three chunks of metrics; `damaged` is the number of a line that holds none."""
    write_run(folder, steps=0)
    lines = [json.dumps({"step": step, "reward": 0.0, "x" * 10_000: step}) for step in range(1, 1001)]
    if damaged is not None:
        lines[damaged - 1] = "oops"
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert 2 * CHUNK_BYTES < (folder / "metrics.jsonl").stat().st_size < 3 * CHUNK_BYTES
    return folder


def test_a_long_run_is_read_while_its_page_is_open(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run")
    client = TestClient(make_app([ViewedRun(folder, refresh_seconds=0)]), base_url="http://127.0.0.1")
    seen = [client.get("/data/runs").json()[0] for _ in range(3)]
    assert 0 < seen[0]["share_read"] < seen[1]["share_read"] == seen[2]["share_read"] == 1
    assert (seen[0]["step"], seen[1]["step"]) < (1000, 1000) == (seen[2]["step"], 1000)
    assert seen[0]["findings"] == [], "the newest steps are not known yet"
    whole = ViewedRun(folder).facts()
    assert whole["findings"], "no answer earns anything"
    assert seen[2] | {"seconds_since_step": 0} == whole | {"seconds_since_step": 0}


def test_a_damaged_line_far_into_a_long_run_is_said_by_every_poll(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run", damaged=900)
    client = TestClient(make_app([ViewedRun(folder, refresh_seconds=0)]), base_url="http://127.0.0.1")
    second_chunk, *answers = [client.get("/data/runs") for _ in range(4)]
    assert [second_chunk.status_code, *(answer.status_code for answer in answers)] == [200, 422, 422, 422]
    told = f"{folder}/metrics.jsonl line 900 is 'oops'"
    assert {answer.json()["error"].partition(",")[0] for answer in answers} == {told}


def test_a_curve_says_what_it_means_and_entries_come_once(client: TestClient) -> None:
    curve = client.get("/data/curve/0/0").json()
    assert (curve["name"], curve["step"], curve["mean"]) == ("reward", [1, 2, 3, 4, 5], [0.1, 0.2, 0.3, 0.4, 0.5])
    assert curve["meaning"]
    assert client.get("/data/curve/0/2").json()["step"] == [2, 3, 4, 5], "step 1 was not finite"
    entries = client.get("/data/entries/0/0").json()
    assert [step for step, _ in entries] == [1, 2, 4]
    kind, row, *figures = entries[0][1][1]
    assert (kind, figures) == ("count", [0.5, 0.0, 1.0, 1, 2])
    assert re.fullmatch("[0-9a-f]{12}", row)
    assert client.get("/data/entries/0/2").json() == entries[2:]


def test_a_step_has_turns_tokens_and_marks(client: TestClient, folder: Path) -> None:
    step = client.get("/data/step/0/4").json()
    right, wrong = step["groups"][1]["answers"]
    assert [turn["text"] for turn in right["turns"]] == ["\\crop{1}", "\\boxed{3}"]
    failure, result = right["turns"][1]["messages"]
    for message, failed in ((failure, True), (result, False)):
        assert (message["role"], message["tool"], message["failed"]) == ("tool", "\\boxed{3}", failed)
    assert result["parts"][1]["frame"] == [1000, 1000]
    assert [(turn["reward"], turn["seconds"]) for turn in right["turns"]] == [(0.25, 0), (0.75, 1.5)]
    assert (right["end"], wrong["turns"][0]["reward"]) == ("done", None)
    assert right["turns"][1]["tokens"]["trainer_logprobs"] == [-0.5, -1.25]
    assert right["marks"] == [{"image": 1, "xy": [0.25, 0.5], "label": "\\boxed{3}"}], "given by the reward"
    assert wrong["marks"] == [{"image": 1, "xy": [0.1, 0.2, 0.5, 0.6], "label": ""}], "found in the text"
    name = step["groups"][0]["messages"][0]["parts"][0]["name"]
    image = client.get(f"/images/0/{name}.png")
    assert image.headers["content-type"] == "image/png"
    assert image.content == (folder / "samples" / "images" / f"{name}.png").read_bytes()


@table("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "a.localhost", ""])
def test_a_name_that_is_not_this_machines_is_refused(client: TestClient, host: str) -> None:
    """Else a page of that site could read runs, by a name that it points at this machine."""
    assert client.get("/data/runs", headers={"host": host}).status_code == 400
    assert client.get("/data/runs", headers={"host": "localhost:8377"}).status_code == 200


def test_other_sites_get_nothing(client: TestClient) -> None:
    for path in ("/", "/view.js", "/data/runs", "/nothing", "/data/step/0/999"):
        headers = client.get(path, headers={"origin": "https://evil.example"}).headers
        assert not any(name.startswith("access-control-") for name in headers)
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["x-content-type-options"] == "nosniff"
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        loaded = ("script-src", "style-src", "img-src", "connect-src")
        refused = ("default-src", "base-uri", "form-action", "frame-ancestors")
        assert policy == dict.fromkeys(loaded, "'self'") | dict.fromkeys(refused, "'none'")
    assert client.post("/data/runs").status_code == 405


def test_the_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/").text
    for name in PAGE_FILES:
        source = page_file(name)
        assert not re.findall(r"(?:https?:)?//[a-z][a-z0-9.-]+\.[a-z]", source.replace("http://www.w3.org", "")), name
        assert client.get(f"/{name}").text == source
    assert set(re.findall(r'(?:src|href)="([^"]+)"', page)) <= set(PAGE_FILES)
    assert "style=" not in page
    assert "<script>" not in page


MISSING = ("/data/step/0/3", "/data/step/1/1", "/data/curve/0/99", "/images/0/..%2F..%2Fconfig.png")


@table(
    "path", [*MISSING, "/images/0/0123456789abcdef.png", "/images/0/short.png", "/../pyproject.toml", "/config.yaml"]
)
def test_what_is_not_there_is_not_found(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_a_damaged_step_is_named(client: TestClient, folder: Path) -> None:
    (folder / "samples" / "step-000002.jsonl").write_text("<script>\n")
    answer = client.get("/data/step/0/2")
    assert answer.status_code == 422
    assert "step-000002.jsonl does not hold sample records" in answer.json()["error"]
    assert answer.headers["content-type"] == "application/json"


def test_a_young_run_has_a_page_and_text_that_no_encoding_can_write_is_sent(tmp_path: Path) -> None:
    odd = write_run(tmp_path / "odd", text="half \ud800 pair")
    young = write_run(tmp_path / "run", steps=0, recorded=())
    client = TestClient(make_app([ViewedRun(odd), ViewedRun(young)]), base_url="http://localhost")
    assert client.get("/data/step/0/1").json()["groups"][0]["truth"] == "half \ud800 pair"
    _, run = client.get("/data/runs").json()
    assert (run["step"], run["metrics"], run["entries"], run["newest_entry"]) == (0, [], 0, None)


def facts(client: TestClient) -> dict[str, object]:
    (run,) = client.get("/data/runs").json()
    return run  # type: ignore[no-any-return]


def test_evaluations_are_listed_with_those_on_test_rows_first(client: TestClient, folder: Path) -> None:
    assert facts(client)["evaluations"] == []
    for name in ("dev-step-000020", "test-before", "dev-step-000100", "test-final", "dev-warmup"):
        write_answers_of(folder, name, ["3"])
    (folder / "answers" / "notes.jsonl").write_text("{}")
    named = ["test-final", "test-before", "dev-warmup", "dev-step-000100", "dev-step-000020"]
    assert facts(client)["evaluations"] == named


def test_answers_come_row_by_row_and_are_bounded(client: TestClient, folder: Path) -> None:
    write_answers_of(folder, "test-final", ["3", "4"])
    answers = client.get("/data/answers/0/0").json()
    assert answers["name"] == "test-final"
    first, second = answers["rows"]
    (answer,) = first.pop("answers")
    asked = {"question": "How many?", "truth": "3", "messages": []}
    assert first == {"id": "test/0", "kind": "colour", "image_type": None, "index": 0, **asked}
    (turn,) = answer["turns"]
    assert (turn["text"], turn["finish"], answer["reward"], answer["accuracy"]) == ("3", "stop", 1.0, 1.0)
    (answer,) = second["answers"]
    assert (answer["turns"][0]["text"], answer["accuracy"]) == ("4", 0.0)
    assert client.get("/data/answers/0/1").status_code == 404
    write_answers_of(folder, "test-final", ["3" * (MAX_CHARS + 1)] * (MAX_ROWS + 1))
    rows = client.get("/data/answers/0/0").json()["rows"]
    assert len(rows) == MAX_ROWS
    assert rows[0]["answers"][0]["turns"][0]["text"] == f"{'3' * MAX_CHARS} ... ({MAX_CHARS + 1:,} characters)"


@table("content", ["<script>\n", "[]\n", '{"id": 1}\n', "[" * 100_000, '{"id": "\ud800"}\n'])
def test_damaged_answers_are_named(client: TestClient, folder: Path, content: str) -> None:
    (folder / "answers").mkdir(exist_ok=True)
    (folder / "answers" / "test-final.jsonl").write_bytes(content.encode("utf-8", "surrogatepass"))
    answer = client.get("/data/answers/0/0")
    told = "test-final.jsonl does not hold answers"
    assert (answer.status_code, told in answer.json()["error"]) == (422, True)


@pytest.mark.parametrize("name", ["answers/test-final.jsonl", "console.txt"])
def test_no_link_leads_out_of_the_run(client: TestClient, folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "private").write_text("secret")
    (folder / "answers").mkdir()
    (folder / name).symlink_to(tmp_path / "private")
    path = "/data/about/0/0" if name == "console.txt" else "/data/answers/0/0"
    answer = client.get(path)
    assert answer.status_code == 422
    assert "leads out of" in answer.json()["error"]
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert client.get(path).status_code == 422


def test_rows_have_the_pictures_that_the_run_has_stored(client: TestClient, folder: Path) -> None:
    images = [Image.new("RGB", (2 * THUMBNAIL_PX, THUMBNAIL_PX), (shade, 0, 0)) for shade in range(MAX_PICTURES + 1)]
    write_pictures(folder, "test", {"test/0": thumbnails(images)})
    write_answers_of(folder, "test-final", ["3", "4"])
    write_answers_of(folder, "dev-step-000001", ["3"])
    first, second = client.get("/data/answers/0/0").json()["rows"]
    ((pictures,), ()) = ([message["parts"] for message in row["messages"]] for row in (first, second))
    assert len(pictures) == MAX_PICTURES
    png = client.get(f"/images/0/{pictures[0]['name']}.png").content
    assert Image.open(io.BytesIO(png)).size == (THUMBNAIL_PX, THUMBNAIL_PX // 2)
    assert client.get("/data/answers/0/1").json()["rows"][0]["messages"] == [], "of another split"


@table("content", ["[]", "no json", '{"test/0": ["../../secret"]}', '{"test/0": 1}', "[" * 100_000])
def test_damaged_names_of_pictures_are_named(client: TestClient, folder: Path, content: str) -> None:
    write_answers_of(folder, "test-final", ["3"])
    (folder / "answers" / "pictures-test.json").write_text(content)
    answer = client.get("/data/answers/0/0")
    told = "pictures-test.json does not hold names of pictures"
    assert (answer.status_code, told in answer.json()["error"]) == (422, True)


def test_turns_of_an_answer_are_kept(client: TestClient, folder: Path) -> None:
    failure = RecordedMessage(role="tool", parts=("no such tool",), tool="loop", failed=True)
    result = RecordedMessage(role="tool", parts=("closer",), tool="look")
    last = RecordedTurn(messages=(failure, result), text="3", finish="length")
    answer = said("3", parts={"form": 0.5}, turns=(RecordedTurn(text="look"), last))
    row = AnsweredRow(id="a", index=0, kind="count", image_type="map", answers=(answer,))
    write_answers(folder, "test-final", [row])
    (shown,) = client.get("/data/answers/0/0").json()["rows"]
    (answered,) = shown["answers"]
    assert (shown["image_type"], answered["parts"]) == ("map", {"form": 0.5})
    assert [(turn["text"], turn["finish"]) for turn in answered["turns"]] == [("look", "stop"), ("3", "length")]
    assert answered["turns"][1]["messages"] == [
        {"role": "tool", "parts": ["no such tool"], "tool": "loop", "failed": True},
        {"role": "tool", "parts": ["closer"], "tool": "look", "failed": False},
    ]


def test_a_part_that_repeats_the_reward_is_named(client: TestClient, folder: Path) -> None:
    lines = [{"step": step, "reward": step / 8, "reward/a": step / 8, "reward/b": 1.0} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert facts(client)["repeats"] == ["reward/a"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward": 0.5, "reward/a": 0.25, "reward/b": 1.0}\n')
    assert facts(client)["repeats"] == []


def test_totals_are_sums_of_all_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "long", steps=0)
    with MetricsLog([JsonlSink(folder)]) as metrics:
        for step in range(1, 1001):
            seconds_of_step = math.nan if step == 999 else 2.0
            metrics.write(step, {"reward": 0.0, "seconds/step": seconds_of_step, "tokens_per_second": 10.0 * step})
    client = TestClient(make_app([ViewedRun(folder)]), base_url="http://127.0.0.1")
    seconds, tokens = (client.get(f"/data/totals/0/{number}").json() for number in (0, 1))
    assert (len(seconds["step"]), seconds["step"][0], seconds["step"][-1]) == (400, 1, 1000)
    assert (seconds["total"][0], seconds["total"][-1]) == (2, 1998)
    assert tokens["total"][-1] == 20 * (1000 * 1001 / 2 - 999)
    assert client.get("/data/totals/0/2").status_code == 404


def test_settings_are_pairs_and_those_of_a_stranger_shown_as_far_as_can_be(client: TestClient, folder: Path) -> None:
    settings = dict(client.get("/data/about/0/0").json()["settings"])
    read = ("max_steps", "evaluate.image_controls", "evaluate.test_size", "train.betas")
    assert [settings[name] for name in read] == ["10", "true", "null", "[0.9, 0.95]"]
    # time without its metric is not known
    assert client.get("/data/totals/0/1").json() == {"step": [], "total": []}
    large = "0x" + "f" * 5000
    (folder / "config.yaml").write_text(f"max_steps: {large}\na: {{b: [{large}], c: {'x' * 9000}}}\n")
    assert facts(client)["max_steps"] is None
    settings = dict(client.get("/data/about/0/0").json()["settings"])
    assert settings["a.b"] == "a number with thousands of digits"
    assert len(settings["a.c"]) < 2100


def test_the_console_is_that_of_the_run_and_bounded(client: TestClient, folder: Path) -> None:
    assert client.get("/data/about/0/0").json()["console"] == ""
    with Progress(1, 0, enabled=False, transcript=folder / "console.txt") as progress:
        progress.print("first")
        before = facts(client)["console_bytes"]
        progress.print("https://me:word@host/ \x1b[2J")
    assert facts(client)["console_bytes"] > before  # type: ignore[operator]
    shown = client.get("/data/about/0/0").json()["console"]
    assert shown == "first\nhttps://***@host/ \N{REPLACEMENT CHARACTER}[2J\n"
    with (folder / "console.txt").open("ab") as file:
        file.write(b"\xff\x1b[1m\n" * MAX_CONSOLE_BYTES)
    shown = client.get("/data/about/0/0").json()["console"]
    assert len(shown) < MAX_CONSOLE_BYTES
    assert "first" not in shown
    assert "\x1b" not in shown


def test_remarks_are_bounded(client: TestClient, folder: Path) -> None:
    for number in range(MAX_HINTS + 1):
        add_hint(folder, f"{number} " + "x" * 2 * MAX_HINT_CHARS)
    hints = facts(client)["hints"]
    assert isinstance(hints, list)
    assert len(hints) == MAX_HINTS
    assert hints[0].startswith(f"0 {'x' * (MAX_HINT_CHARS - 2)} ... (")
