"""The command `fovea view`."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from threading import Thread
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner, Result

from fovea.cli.main import app
from fovea.report.viewed_run import ViewedRun
from fovea.view.server import make_app, serve
from tests.report.folders import write_run


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
