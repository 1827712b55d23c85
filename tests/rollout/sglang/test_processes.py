"""SGLang's processes: one that hangs is a lost engine, and of a closed one nothing is left."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import pytest

from fovea.errors import LostEngineError
from fovea.processes.engine_process import Limits
from fovea.rollout.sglang.engine import CACHE, SglangEngine
from fovea_gym.errors import ConfigError
from fovea_gym.utils.event_loop import wait_for
from tests.process_groups import members
from tests.rollout.engine_suite import ask, prompts_of
from tests.rollout.engines.on_sglang import workers
from tests.rollout.engines.serving import serving, start, sync, tiny_for


def test_a_call_longer_than_the_pipe_arrives_whole(shared: SglangEngine) -> None:
    """The host begins to read it while the rest of it is still to be written."""
    assert shared.process.call("abort", "of no request" * 2_000_000).result() is None


def test_memory_is_freed_when_the_scheduler_is_done_with_all_requests(shared: SglangEngine) -> None:
    """It tells of an end before it has put the request away; asked for memory in between, SGLang ends itself."""
    parts = tiny_for("qwen3_vl", num_kv_heads=2)
    sync(shared, parts, 1)
    prompt = prompts_of(parts)[0]
    for attempt in count():  # until the end comes amid the drawing, on a machine of any speed
        name = f"long/{attempt}"
        sample_inputs = shared.translator.sample_inputs(ask(name, prompt, max_new_tokens=900))
        drawing = shared.process.call("generate", name, sample_inputs)
        time.sleep(0.25 * 2**attempt)
        freed = shared.process.call("release", [CACHE])
        shared.process.run("abort", name)
        length = len(drawing.result().completions[0].token_ids)
        freed.result()
        shared.process.run("restore", [CACHE])
        assert length < 900
        if length:
            break
    assert wait_for(shared.generate(ask("next", prompt)))


def test_an_engine_that_hangs_is_an_error_that_names_the_setting_and_leaves_nothing(tmp_path: Path) -> None:
    parts = tiny_for("qwen3_vl")
    with serving(parts, tmp_path / "model") as served:
        served.sync(1)
        engine = served.engine
        assert isinstance(engine, SglangEngine)
        assert len(members(engine.process.pid)) >= 3, "host, scheduler, detokenizer"
        assert engine.process.folder.is_dir()
        workers(engine)[0].suspend()
        engine.process.limits = Limits(start_seconds=1.0, timeout_seconds=2.0)
        message = r"gave no answer for rollout\.engine\.timeout_seconds=2 and was ended.*; its log is (\S+)$"
        with pytest.raises(LostEngineError, match=message) as lost:
            wait_for(engine.generate(ask("hung", prompts_of(parts)[0])))
        assert Path(str(lost.value).rpartition(" ")[2]).stat().st_size > 0
    assert not members(engine.process.pid)
    assert not engine.process.folder.exists()


def test_an_engine_that_does_not_start_in_time_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout.engine=sglang does not start: .*rollout\.engine\.start_seconds=0.1"
    ):
        start(tiny_for("qwen3_vl"), tmp_path / "model", start_seconds=0.1)
