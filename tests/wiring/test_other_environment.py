"""What the process of `rollout.engine.python` gets, and what is said where it does not start."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fovea.config.backends import VllmSettings
from fovea.config.run import Config
from fovea.errors import EngineError, LostEngineError
from fovea.models.processor import load_processor
from fovea.processes.engine_process import EngineProcess
from fovea.wiring.engine import make_streamed
from fovea.wiring.interpreter import variables_of
from fovea.wiring.other_environment import RequestTasks
from fovea_gym.errors import ConfigError, FoveaError, OutOfMemoryError
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.engine_suite import ask, prompts_of
from tests.rollout.fake_engine_host import FOR_EVER, FORGETTING_SECONDS, FakeEngine
from tests.tiny_models import save, tiny


def make(tmp_path: Path, python: Path | str, **settings: Any) -> None:
    config = Config.model_validate({"model": {"path": str(save(tiny("qwen3_vl"), tmp_path / "model"))}})
    engine = VllmSettings(python=str(python), **settings)
    make_streamed(config, engine, config.model, load_processor(config.model))


def interpreter(folder: Path, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_it_imports_nothing_of_the_trainers_environment_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, here = tmp_path / "theirs", tmp_path / "here"
    for folder in (theirs, here):
        folder.mkdir()
        (folder / "torch.py").write_text("raise ValueError('not that of the environment')")
    monkeypatch.chdir(here)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, str(theirs))
    python = interpreter(tmp_path / "bin", f'env > {tmp_path}/env; exec {sys.executable} "$@"')
    # the interpreter of this test has no vLLM: all imports before that have succeeded
    with pytest.raises(ConfigError, match=r"rollout\.engine=vllm .* is not installed"):
        make(tmp_path, "../bin/python")
    variables = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert not variables.keys() & {"PYTHONHOME", "VIRTUAL_ENV"}
    found = (variables["PATH"].split(os.pathsep)[0], variables["PYTHONPATH"])
    assert found == (str(python.parent), str(Path(__file__).parents[2]))


def test_an_installed_fovea_is_not_lent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Beside it are the packages of the trainer."""
    monkeypatch.setattr("fovea.__file__", str(tmp_path / "site-packages" / "fovea" / "__init__.py"))
    assert variables_of("/env/bin/python")["PYTHONPATH"] is None


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f'exec {sys.executable} -I -S "$@"', "No module named 'fovea'"),
        ("exit 0", "no output"),
        ("echo bad interpreter; exit 3", "bad interpreter"),
    ],
)
def test_an_interpreter_without_fovea_is_told_what_to_install(script: str, said: str, tmp_path: Path) -> None:
    python = interpreter(tmp_path / "bin", script)
    # the gym by its folder too, since no index has it
    install = r"pip install (-e )?'\S+/gym' (-e )?'\S+\[vllm\]'"
    advice = rf"if Fovea or the engine is missing there: {python} -m {install}$"
    with pytest.raises(ConfigError, match=rf"^rollout\.engine\.python={python}: .*{said}.*; {advice}"):
        make(tmp_path, python)


def test_what_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(LostEngineError, match="has ended"):
        make(tmp_path, interpreter(tmp_path / "bin", "kill -9 $$"))
    python = interpreter(tmp_path / "bin", "")
    python.write_text("no script")
    with pytest.raises(ConfigError, match=r"^rollout\.engine\.python=.*Exec format error"):
        make(tmp_path, python)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OutOfMemoryError, OutOfMemoryError), (LostEngineError, LostEngineError), (EngineError, ConfigError)],
)
def test_an_error_of_the_start_keeps_the_exit_code_that_a_supervisor_reads(
    error: type[FoveaError], raised: type[FoveaError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error("what happened")

    monkeypatch.setattr("fovea.wiring.engine.EngineProcess", fail)
    with pytest.raises(FoveaError, match="what happened") as failed:
        make(tmp_path, sys.executable)
    assert type(failed.value) is raised


def test_the_engine_is_made_of_the_settings_that_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of those that the run's settings have besides."""
    got: list[Mapping[str, Any]] = []
    monkeypatch.setattr(EngineProcess, "__init__", lambda *arguments: got.append(arguments[3]))
    make(tmp_path, sys.executable, max_num_seqs=3)
    sent = Config.model_validate(json.loads(json.dumps(got[0]["config"])))
    assert sent.rollout.engine == VllmSettings(max_num_seqs=3)


def test_an_id_is_used_again_before_its_first_request_has_ended() -> None:
    served = RequestTasks(FakeEngine({}))
    request = replace(ask("request", prompts_of(tiny("qwen3_vl"))[0]), id=FOR_EVER)

    async def twice() -> None:
        first = asyncio.ensure_future(served.generate(request))
        await asyncio.sleep(0)
        aborted = asyncio.ensure_future(served.abort(FOR_EVER))
        await asyncio.sleep(FORGETTING_SECONDS / 3)
        second = asyncio.ensure_future(served.generate(request))
        await aborted
        await asyncio.sleep(0)
        assert not second.done()
        await served.abort(FOR_EVER)
        done, _ = await asyncio.wait([first, second], timeout=5)
        assert len(done) == 2
        for drawing in done:
            with pytest.raises(EngineError, match="aborted"):
                await drawing

    wait_for(twice())
