"""The command `fovea view`, the list of a folder of runs, and the pages that it leads to."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from threading import Thread
from urllib.request import urlopen

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner, Result

from fovea.cli.main import app
from fovea.report.viewed_run import ViewedRun
from fovea.run.lock import locked
from fovea.view.list_app import make_list_app
from fovea.view.run_list import ListedRun, is_folder_of_runs, listed_runs
from fovea.view.server import make_app, serve
from tests.report.folders import finish_run, write_run
from tests.report.pages import ATTACK


def view(*words: str) -> Result:
    return CliRunner().invoke(app, ["view", *words])


def test_an_export_says_where_its_page_is(tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run"), tmp_path / "out.html"
    result = view(str(run), "--export", str(out))
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert out.is_file()
    for wrong in (tmp_path / "out", tmp_path):
        refused = view(str(run), "--export", str(wrong))
        assert refused.exit_code == 2
        assert refused.stderr == f"error: --export {wrong}: the page is one file; give a name that ends in .html\n"


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    result = view(str(tmp_path))
    assert result.exit_code == 2
    assert "not a run folder: no config.yaml in it, nor in a folder below; give the folder of a run" in result.stderr
    assert "none: no such run folder; give" in view(str(tmp_path / "none")).stderr
    for number in range(6):
        write_run(tmp_path / f"run{number}")
    inside = ", ".join(f"{tmp_path}/run{number}" for number in range(4))
    exported = view(str(tmp_path), "--export", str(tmp_path / "out.html"))
    assert f"not a run folder: no config.yaml in it; give a run in it: {inside}, ..." in exported.stderr
    assert "config.yaml: a file, not a run folder; give" in view(str(tmp_path / "run0" / "config.yaml")).stderr


def test_a_folder_of_runs_is_served_as_a_list(tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    command = [sys.executable, "-m", "fovea", "view", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        page = urlopen(address, timeout=60).read().decode()
        server.terminate()
    assert 'href="runs/one/"' in page


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = view(str(run), "--port", str(port))
    assert result.exit_code == 2
    assert re.search(rf"error: --port {port}: .*give another port, or 0 for any free port", result.stderr)


REQUEST = b"GET /data/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def port_of(run: Path) -> int:
    """The port of a server of this run, which ends with the process."""
    addresses: Queue[str] = Queue()
    Thread(target=serve, args=(make_app([ViewedRun(run)]), 0, addresses.put), daemon=True).start()
    return int(addresses.get(timeout=60).rstrip("/").rpartition(":")[2])


def test_no_answer_waits_for_an_acknowledgement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head and body of an answer are two writes: with Nagle's algorithm the second waits for an ACK, 40 ms."""
    options: list[tuple[object, ...]] = []
    plain = socket.socket.setsockopt

    def noted(self: socket.socket, *option: int) -> None:
        options.append(option)
        plain(self, *option)

    monkeypatch.setattr(socket.socket, "setsockopt", noted)
    with socket.create_connection(("127.0.0.1", port_of(write_run(tmp_path / "run")))) as browser:
        browser.sendall(REQUEST)
        assert browser.recv(12) == b"HTTP/1.1 200"
    assert (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1) in options


def test_connections_that_send_their_headers_slowly_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea.view.server.HEADER_SECONDS", 1.0)
    address = ("127.0.0.1", port_of(write_run(tmp_path / "run")))
    with ExitStack() as opened:
        slow = [opened.enter_context(socket.create_connection(address, timeout=10)) for _ in range(3)]
        slow[1].sendall(REQUEST[:20])
        slow[2].sendall(REQUEST)  # its second request is slow
        assert slow[2].recv(1 << 20).startswith(b"HTTP/1.1 200")
        slow[2].sendall(REQUEST[:20])
        for each in slow:
            while each.recv(1 << 20):
                pass


def line(folder: Path, name: str) -> ListedRun:
    (found,) = (run for run in listed_runs(folder) if run.name == name)
    return found


def test_a_run_has_its_state(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    assert line(tmp_path, "one").state == "stopped"
    with locked(run):
        assert line(tmp_path, "one").state == "running"
        lock = json.loads((run / "run.lock").read_text())
    assert line(tmp_path, "one").state == "stopped"
    code = f"import os, pathlib, fovea.run.lock as lock\nwith lock.locked(pathlib.Path({str(run)!r})): os._exit(1)"
    subprocess.run([sys.executable, "-c", code], check=False)
    assert line(tmp_path, "one").state == "killed"
    (run / "run.lock").write_text(json.dumps(lock | {"host": "elsewhere"}))
    assert line(tmp_path, "one").state == "running on elsewhere, or killed there"
    (run / "run.lock").write_text("")
    finish_run(run, right=1, wrong=1)
    assert line(tmp_path, "one").state == "finished"


@pytest.mark.parametrize("pid", [0, -1, 10**30, "1", None, 1.5, True])
def test_a_lock_file_of_a_stranger_asks_for_no_other_process(tmp_path: Path, pid: object) -> None:
    run = write_run(tmp_path / "one")
    with locked(run):
        lock = json.loads((run / "run.lock").read_text())
    (run / "run.lock").write_text(json.dumps(lock | {"pid": pid}))
    assert line(tmp_path, "one").state == "stopped"


def test_figures_are_the_newest_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    found = line(tmp_path, "one")
    assert (found.step, found.max_steps, found.reward, found.accuracy) == (5, 10, 0.5, "")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "reward": 0.25, "accuracy/dev": 0.125}\n{"step": 7, "reward": 0.5}\n{"step": 8, "rew')
    found = line(tmp_path, "one")
    assert (found.step, found.reward, found.accuracy) == (7, 0.5, "dev 12.5 %")
    finish_run(run, right=3, wrong=1)
    assert line(tmp_path, "one").accuracy == "test 75.0 [30, 95] %"


def test_of_a_long_run_only_the_end_is_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    lines = ("".join(json.dumps({"step": step, "reward": 0.5, "x" * 90: 1.0}) + "\n") for step in range(1, 20_001))
    (run / "metrics.jsonl").write_text("not metrics\n" + "".join(lines))
    assert line(tmp_path, "one").step == 20_000


def test_a_young_run_and_a_damaged_one_are_listed_and_links_are_not(tmp_path: Path) -> None:
    write_run(tmp_path / "young", steps=0, recorded=())
    damaged = write_run(tmp_path / "damaged")
    (damaged / "metrics.jsonl").write_text("<b>\n")
    fifo = write_run(tmp_path / "fifo")
    (fifo / "metrics.jsonl").unlink()
    os.mkfifo(fifo / "metrics.jsonl")
    (tmp_path / "latest").symlink_to(tmp_path / "young")
    runs = {run.name: run for run in listed_runs(tmp_path)}
    assert (set(runs), runs["young"].step) == ({"young", "damaged", "fifo"}, 0)
    assert "cannot be read" in runs["damaged"].state
    assert "is not a regular file" in runs["fifo"].state


@pytest.mark.parametrize(
    "settings", ["max_steps: 1" + "0" * 5000, "max_steps: 0x" + "f" * 5000, "[", "- 1", "a: &a [*a]", "max_steps: .inf"]
)
def test_settings_of_a_stranger_hide_no_other_run(tmp_path: Path, settings: str) -> None:
    write_run(tmp_path / "sound")
    (write_run(tmp_path / "odd") / "config.yaml").write_text(settings)
    answer = TestClient(make_list_app(tmp_path), base_url="http://127.0.0.1").get("/")
    assert answer.status_code == 200
    assert "5 of 10" in answer.text


def test_the_newest_is_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old", "older")):
        metrics = write_run(tmp_path / name) / "metrics.jsonl"
        os.utime(metrics, (time.time() - 60 * age,) * 2)
    assert [run.name for run in listed_runs(tmp_path)] == ["new", "old", "older"]
    assert is_folder_of_runs(tmp_path)
    assert not is_folder_of_runs(tmp_path / "new")
    assert not is_folder_of_runs(tmp_path / "nothing")


def test_links_lead_to_a_run_and_to_several(tmp_path: Path) -> None:
    for name in ("one", "a, b?"):
        write_run(tmp_path / name)
    client = TestClient(make_list_app(tmp_path), base_url="http://127.0.0.1")
    assert 'href="runs/a%2C%20b%3F/"' in client.get("/").text
    assert [run["name"] for run in client.get("/runs/a%2C%20b%3F/data/runs").json()] == ["a, b?"]
    compared = client.get("/compare?run=one&run=one")
    assert str(compared.url) == "http://127.0.0.1/runs/one%2Cone/"
    assert [run["name"] for run in client.get("/runs/one%2Cone/data/runs").json()] == ["one", "one"]
    assert client.get("/runs/one/").text == client.get("/runs/one%2Cone/").text
    assert client.get("/runs/one/data/curve/0/0").json()["name"] == "reward"
    assert str(client.get("/compare").url) == "http://127.0.0.1/"


def test_nothing_else_is_reached(tmp_path: Path) -> None:
    write_run(tmp_path / "inside" / "one")
    write_run(tmp_path / "two")
    client = TestClient(make_list_app(tmp_path / "inside"), base_url="http://127.0.0.1")
    for path in ("runs/two/", "runs/%2E%2E/", "runs/..%2Fone/", "runs/one,/", "config.yaml", "runs.html.j2"):
        assert client.get(f"/{path}").status_code == 404, path


def test_names_stay_text_and_the_list_has_the_headers_of_the_page(tmp_path: Path) -> None:
    name = ATTACK.replace("/", "")
    write_run(tmp_path / name / name)
    client = TestClient(make_list_app(tmp_path / name), base_url="http://127.0.0.1")
    answer = client.get("/")
    assert (name in answer.text, "<script" in answer.text) == (False, False)
    assert answer.headers["x-content-type-options"] == "nosniff"
    (policy,) = answer.headers.get_list("content-security-policy")
    assert all(part in policy for part in ("form-action 'self'", "default-src 'none'"))
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    elsewhere = client.get("/compare?run=//evil.example", follow_redirects=False)
    assert elsewhere.headers["location"].startswith("runs/%2F%2F")
