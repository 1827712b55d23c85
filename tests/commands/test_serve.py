"""`fovea serve` without its engine: who may call the server, and that a process ends with all that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fovea.commands.serve import ServerAddress, example, running, served_folder, wait_until_healthy
from fovea.commands.targets import CheckpointTarget
from fovea.errors import EngineError
from fovea.models.tiny import save_tiny
from fovea.rollout.server import Launch, ModelServer
from fovea_gym.errors import ConfigError
from tests.tiny_models import tiny


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "example.org", "::"])
def test_other_machines_are_served_with_a_key_only(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--api-key-env VARIABLE\b"):
        ServerAddress(host=host).api_key()
    with pytest.raises(ConfigError, match="this environment variable is not set"):
        ServerAddress(host=host, api_key_env="FOVEA_TEST_KEY").api_key()
    monkeypatch.setenv("FOVEA_TEST_KEY", " secret\n")
    assert ServerAddress(host=host, api_key_env="FOVEA_TEST_KEY").api_key() == "secret"


def test_a_key_is_needed_for_other_machines_only_and_for_training() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.5"):
        assert ServerAddress(host=host).api_key() is None
    assert ServerAddress(host="::1", port=80).url == "http://[::1]:80"
    assert [ServerAddress(host=host).api_key("made") for host in ("127.0.0.1", "0.0.0.0")] == ["made"] * 2
    # a port that is taken is an error before anything is loaded
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen there .*in use"):
            ServerAddress(port=taken.getsockname()[1]).check_free()


def test_the_example_names_the_variable_of_the_key_and_nothing_prints_the_key(tmp_path: Path) -> None:
    text = example(ServerAddress(host="0.0.0.0", port=8001, api_key_env="MY_KEY"), "geo3k")
    said = ["curl http://127.0.0.1:8001/v1/chat/completions", '"Authorization: Bearer $MY_KEY"', '"model": "geo3k"']
    assert [line for line in said if line not in text] == []
    server = ModelServer(folder=tmp_path, name="x", host="127.0.0.1", port=1, api_key="secret")
    assert "secret" not in repr(server)
    assert "secret" not in repr(Launch(command=["x"], environment={"KEY": "secret"}))


def test_a_folder_is_served_as_it_is_and_anything_else_named(tmp_path: Path) -> None:
    save_tiny(tiny("qwen3_vl"), tmp_path / "model")
    assert served_folder(str(tmp_path / "model"), print) == tmp_path / "model"
    for source in ("majority", "ORG/NAME", "http://127.0.0.1:8000"):
        with pytest.raises(ConfigError, match="serve a run, a checkpoint, or the folder of a model"):
            served_folder(source, print)


def python(code: str) -> Launch:
    return Launch(command=[sys.executable, "-c", code], environment=os.environ)


def has_ended(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or " Z " in status.read_text()


def wait_until(is_so: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_and_its_own_end_with_the_block(tmp_path: Path) -> None:
    """The child ignores SIGTERM and its child is not even told: both are killed."""
    pids = tmp_path / "pids"
    code = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({str(pids)!r}, "w").write(str(inner.pid) + " ")
time.sleep(600)
"""
    with running(python(code), ending_seconds=0.5) as child:
        wait_until(lambda: pids.exists() and pids.read_text().endswith(" "))
    assert child.exit_code is not None
    wait_until(lambda: has_ended(int(pids.read_text())), seconds=10)


def test_a_server_that_ends_before_it_answers_is_an_error() -> None:
    launch = python("raise SystemExit(7)")
    with running(launch) as child, pytest.raises(EngineError, match="ended with code 7"):
        wait_until_healthy(child, "http://127.0.0.1:9", max_seconds=60)


def test_a_second_ctrl_c_kills_what_is_still_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the server, which ignores SIGTERM, has time to finish."""
    ready = tmp_path / "ready"
    code = f"import signal, time; signal.signal(15, signal.SIG_IGN); open({str(ready)!r}, 'w'); time.sleep(60)"
    wait = subprocess.Popen.wait

    def interrupted(child: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return wait(child)
        raise KeyboardInterrupt

    served = running(python(code), ending_seconds=60)
    child = served.__enter__()
    wait_until(ready.exists)
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        served.__exit__(None, None, None)
    assert child.exit_code == -signal.SIGKILL


def test_a_checkpoint_that_is_younger_than_its_export_is_exported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[Path] = []

    def export(_source: Path, out: Path, *, trust: bool) -> None:
        assert not out.exists()
        out.mkdir(parents=True)
        exported.append(out)

    checkpoint = tmp_path / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    target = CheckpointTarget(run=tmp_path, folder=checkpoint, name="run")
    for name, stand_in in (("parse_target", lambda _: target), ("export", export), ("step_of", lambda _: 3)):
        monkeypatch.setattr(f"fovea.commands.serve.{name}", stand_in)
    folder = served_folder("run", print)
    assert served_folder("run", print) == folder
    assert len(exported) == 1
    later = folder.stat().st_mtime + 1
    os.utime(checkpoint, (later, later))
    assert served_folder("run", print) == folder
    assert len(exported) == 2


KILLED = """
import sys, time
from fovea.rollout.server import Launch
from fovea.commands.serve import running
inner = "import subprocess, time; from multiprocessing.shared_memory import SharedMemory as S"
inner += "; memory, process = S(create=True, size=9), subprocess.Popen(['sleep', '600'], start_new_session=True)"
inner += "; print(memory.name, process.pid, flush=True); time.sleep(600)"
with running(Launch(command=[sys.executable, "-c", inner], environment={})) as child:
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_a_killed_command_leaves_no_process_and_no_shared_memory() -> None:
    """SIGKILL, of which it cannot tell its server and what that has started."""
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        words = [word for _ in range(2) for word in command.stdout.readline().split()]
        started = [int(word) for word in words if word.isdecimal()]
        (memory,) = [Path("/dev/shm") / word for word in words if not word.isdecimal()]
        assert memory.is_file()
        assert not any(map(has_ended, started))
        command.kill()
    wait_until(lambda: not memory.exists() and all(map(has_ended, started)), seconds=15)
