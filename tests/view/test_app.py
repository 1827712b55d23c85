from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fovea.report.curves import CHUNK_BYTES
from fovea.report.page_files import PAGE_FILES, page_file
from fovea.report.viewed_run import ViewedRun
from fovea.view.server import make_app
from gym_tests.tables import table
from tests.report.folders import write_run


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


def test_a_curve_says_what_it_means(client: TestClient) -> None:
    curve = client.get("/data/curve/0/0").json()
    assert (curve["name"], curve["step"], curve["mean"]) == ("reward", [1, 2, 3, 4, 5], [0.1, 0.2, 0.3, 0.4, 0.5])
    assert curve["meaning"]
    assert client.get("/data/curve/0/2").json()["step"] == [2, 3, 4, 5], "step 1 was not finite"


def test_entries_come_once(client: TestClient) -> None:
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
