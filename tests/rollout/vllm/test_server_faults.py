"""Faults between trainer and servers that a healthy vLLM does not show: without one, against servers of these tests."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fovea.errors import EngineError
from fovea.rollout.server import ModelServer
from fovea.rollout.server_guard import Message, Receive, Send
from fovea.rollout.vllm.server import WEIGHTS_DIR_ENV, launch
from fovea.rollout.vllm.server_worker import FolderReceiver
from fovea.rollout.vllm.servers import SameSync, ServerFacts, VllmServers
from fovea.rollout.vllm.sync_folder import SyncFolder
from fovea_gym.errors import ConfigError
from fovea_gym.utils.event_loop import wait_for
from fovea_gym.utils.http_json import CallBounds, JsonServer
from gym_tests.chat_server import Endpoint
from gym_tests.tables import table
from tests.rollout.asgi_calls import answer_of, everybody
from tests.rollout.short_runs import LIMIT_SECONDS


def command(folder: Path, **arguments: Any) -> list[str]:
    return list(launch(ModelServer(folder=folder, name="x", host="127.0.0.1", port=1, arguments=arguments)).command)


FIXED = "trust_remote_code=True: `fovea serve` sets it to False; remove it"


@table(
    ("key", "message"),
    [("trust-remote-code", FIXED), ("trust_remote_code", FIXED), ("api-key", "use --api-key-env")],
)
def test_what_is_fixed_or_secret_is_on_no_command_line_in_either_spelling(
    key: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        command(tmp_path, **{key: True})


def test_a_limit_of_images_leaves_videos_off(tmp_path: Path) -> None:
    words = command(tmp_path, limit_mm_per_prompt={"image": 2})
    assert json.loads(words[words.index("--limit-mm-per-prompt") + 1]) == {"video": 0, "image": 2}


@table("name", ["..", ".", "a/b", "/tmp", "run-0123456789abcdef/..", "run-0123456789abcdef"])
def test_a_worker_reads_weight_syncs_in_its_own_folder_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir(exist_ok=True)
    (tmp_path / "stolen.safetensors").write_bytes(b"")
    monkeypatch.setenv(WEIGHTS_DIR_ENV, str(tmp_path / "weights"))
    assert "no weight sync" in FolderReceiver().load_sync(name, True, {})["problem"]


@table(
    ("held", "takes_over", "is_refused"),
    [("1" * 16, False, True), ("1" * 16, True, False), ("2" * 16, False, False), ("", False, False)],
)
def test_a_weight_sync_over_that_of_another_run_is_refused(
    held: str, takes_over: bool, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WEIGHTS_DIR_ENV, str(tmp_path))
    worker = FolderReceiver()
    worker.held_sync = held and f"run-{held}/5"
    problem = worker.load_sync(f"run-{'2' * 16}/6", takes_over, {})["problem"]
    assert ("another run" in problem) == is_refused, problem


def begun(folder: Path) -> SyncFolder:
    """A folder in which a weight sync has begun."""
    syncs = SyncFolder(folder, torch.float32, str)
    syncs.begin()
    return syncs


def syncs_in(folder: Path) -> list[str]:
    return [str(each.relative_to(folder)) for each in folder.glob("run-*/[0-9]*") if each.is_dir()]


def test_pushes_that_broke_off_are_deleted_with_the_next(tmp_path: Path) -> None:
    syncs = begun(tmp_path)
    syncs.begin()
    syncs.begin()
    assert len(syncs_in(tmp_path)) == 3
    syncs.delete_older()
    assert syncs_in(tmp_path) == [syncs.finish().name]
    syncs.delete()
    assert not list(tmp_path.iterdir())


def test_pushes_of_a_killed_trainer_are_deleted_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    code = f"""
import os, torch
from pathlib import Path
from fovea.rollout.vllm.sync_folder import SyncFolder
SyncFolder(Path({str(tmp_path)!r}), torch.float32, str).begin()
os.kill(os.getpid(), 9)
"""
    living = begun(tmp_path)
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(syncs_in(tmp_path)) == 2
    later = begun(tmp_path)
    assert sorted(syncs_in(tmp_path)) == sorted([living.finish().name, later.finish().name])


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    """The limit of a file's length stands in for it: the write itself fails."""
    syncs = begun(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(EngineError, match=r"weights_dir=.*File too large; it must be writable, with room for"):
            syncs.write([("x", torch.zeros(1000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_of_a_weight_sync_can_be_read_by_whoever_can_read_its_folder(tmp_path: Path) -> None:
    syncs = begun(tmp_path)
    syncs.write([("x", torch.zeros(2))])
    folder = tmp_path / syncs.finish().name
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o444 == folder.stat().st_mode & 0o444


def test_an_answer_that_was_begun_before_other_weights_came_is_refused() -> None:
    """The weight sync comes while a request waits in the engine, past the first check; other methods are not called."""
    is_refused = False

    async def collective_rpc(_method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        return [{"problem": "another run"} if is_refused else {"arrived": args[0]}]

    engine = SimpleNamespace(collective_rpc=collective_rpc)
    vllm = SimpleNamespace(state=SimpleNamespace(engine_client=engine))

    async def amid(_scope: Message, _receive: Receive, send: Send) -> None:
        assert await load("run-2/0") == 200
        await everybody(_scope, _receive, send)

    server = SameSync(amid)

    async def load(name: str, method: str = "load_sync") -> int:
        body = json.dumps({"method": method, "args": [name, True, {}]}).encode()
        return (await answer_of(server, "/collective_rpc", body, app_state=vllm))[0]

    async def generate(name: str) -> int:
        return (await answer_of(server, "/generate", x_fovea_sync=name))[0]

    async def use() -> None:
        nonlocal is_refused
        assert await load("run-1/0", "save_sharded_state") == 403
        assert await generate("run-1/0") == 409
        assert await load("run-1/0") == 200
        assert [await generate("run-1/0"), await generate("run-1/0")] == [409, 409]
        is_refused = True
        assert await generate("run-2/0") == 200

    wait_for(use())


RECEIVED, EMPTIED = (200, b""), (200, b'{"success": true}')
FACTS = {"dtype": "float32", "max_model_len": 64, "max_images": 1}


def answer(**found: object) -> tuple[int, bytes]:
    """Of `/collective_rpc`."""
    return 200, json.dumps({"results": [found]}).encode()


def facts(held_sync: str) -> tuple[int, bytes]:
    return answer(**FACTS, logprobs_mode="processed_logprobs", normalizes_pixels=False, held_sync=held_sync)


def engine_of(endpoint: Endpoint, folder: Path) -> VllmServers:
    return VllmServers(
        [JsonServer(endpoint.url, CallBounds(timeout_seconds=LIMIT_SECONDS, calls_at_once=4))],
        ServerFacts(**FACTS),
        SimpleNamespace(check=lambda _shapes: None, slices={}),  # type: ignore[arg-type]
        SyncFolder(folder, torch.float32, str),
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        restart_seconds=LIMIT_SECONDS,
    )


def paths_of(endpoint: Endpoint, number: int) -> list[str]:
    """Paths of the calls that have come, once there are that many."""
    while len(paths := [str(each["path"]).removeprefix("/v1") for each in endpoint.requests]) < number:
        time.sleep(0.02)
    return paths


def test_a_server_that_is_lost_before_its_caches_are_empty_loads_the_weight_sync_again(
    started: Callable[..., Endpoint], tmp_path: Path
) -> None:
    """It holds the weight sync and says so, but it is paused, with keys and values of older weights."""
    endpoint = started(facts(""), RECEIVED)
    engine = engine_of(endpoint, tmp_path)
    try:
        engine.begin_sync({})
        loaded = answer(arrived={}, held={})
        (sync,) = syncs_in(tmp_path)
        endpoint.replies = [facts(""), RECEIVED, loaded, (503, b""), facts(sync)]
        endpoint.replies += [facts(sync), RECEIVED, loaded, EMPTIED, RECEIVED]
        endpoint.requests.clear()
        engine.finish_sync(1)
        paths = paths_of(endpoint, 12)
    finally:
        wait_for(engine.close())
    caches = ["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"]
    load = ["/collective_rpc", "/pause?mode=abort", "/collective_rpc"]
    assert paths == [*load, caches[0], "/collective_rpc", *load, *caches, "/resume"]
