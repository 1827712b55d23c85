"""The made-up run of `benchmarks.view_browser` is one that `fovea view` shows."""

from __future__ import annotations

from pathlib import Path

from starlette.testclient import TestClient

from benchmarks.view_browser import make_run
from fovea.report.viewed_run import ViewedRun
from fovea.view.server import make_app


def test_the_page_has_the_steps_and_groups_of_a_made_up_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 20)
    client = TestClient(make_app([ViewedRun(tmp_path / "run")]), base_url="http://127.0.0.1")
    assert len(client.get("/data/step/0/20").json()["groups"]) == 4
    assert client.get("/data/curve/0/7").status_code == 200
