"""What only SGLang has: its list of arguments, models that it would misread, its processes, and its schedulers."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from pathlib import Path

import pytest
import torch
from sglang.srt.server_args import ServerArgs
from torch import nn

from fovea.errors import EngineError, LostEngineError
from fovea.processes.engine_process import Limits
from fovea.rollout.sglang import engine as engine_module
from fovea.rollout.sglang.arguments import CPU_ARGUMENTS, SETTINGS
from fovea.rollout.sglang.engine import CACHE, SglangEngine
from fovea.rollout.sglang.scheduler import differences
from fovea.rollout.sglang.weights import Sent
from fovea.utils.checksum import value_hash
from fovea_gym.errors import ConfigError
from fovea_gym.utils.event_loop import wait_for
from gym_tests.tables import table
from tests.process_groups import members
from tests.rollout.engine_suite import ask, begun, prompts_of, slow
from tests.rollout.engines.on_sglang import arguments, workers
from tests.rollout.engines.under_test import serving, start, sync, tiny_for
from tests.tiny_models import tiny


def test_further_arguments_reach_sglang_beside_the_settings() -> None:
    made = arguments({"schedule_policy": "fcfs", "log_level": "info"}, max_num_seqs=17)
    assert (made["schedule_policy"], made["log_level"], made["max_running_requests"]) == ("fcfs", "info", 17)
    assert (made["context_length"], made["random_seed"], made["device"]) == (108, 3, "cpu")


def test_every_argument_is_one_that_sglang_has() -> None:
    for device in ("cpu", "cuda:1"):
        made = arguments({}, device, max_total_tokens=9000, max_num_batched_tokens=512)
        assert SETTINGS.keys() <= made.keys() <= set(ServerArgs.__struct_fields__)
    assert (made["base_gpu_id"], made["enable_memory_saver"], made["chunked_prefill_size"]) == (1, True, 512)
    assert not made.keys() & CPU_ARGUMENTS.keys()
    assert arguments({}, "cuda:0", enable_chunked_prefill=False)["chunked_prefill_size"] == -1


@table(
    ("family", "message"),
    [
        ("qwen2_5_vl", r"SGLang mistakes patches of a Qwen2\.5-VL for features .* has patches of 8 x 8"),
        ("qwen3_vl_moe", r"features of 3 vision layers .* has deepstack_visual_indexes=\[0\]; use"),
    ],
)
def test_models_that_sglang_would_misread_are_refused(family: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        start(tiny(family), tmp_path / family)


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


def test_a_weight_sync_waits_for_requests_that_were_cancelled_and_not_for_ever(
    shared: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "ABORT_SECONDS", 0.0)
    parts = tiny_for("qwen3_vl", num_kv_heads=2)
    sync(shared, parts, 7)

    async def cancel() -> None:
        drawing = await begun(shared, slow("cancelled", prompts_of(parts)[0]))
        drawing.cancel()
        await asyncio.wait([drawing])
        with pytest.raises(EngineError, match="has not ended 1 cancelled requests"):
            shared.begin_sync({name: tuple(weight.shape) for name, weight in parts.network.named_parameters()})

    wait_for(cancel())
    monkeypatch.undo()
    sync(shared, parts, 11)


def test_an_engine_that_hangs_is_an_error_that_names_the_setting_and_leaves_nothing(tmp_path: Path) -> None:
    with serving(tiny_for("qwen3_vl"), tmp_path / "model") as served:
        served.sync(1)
        engine = served.engine
        assert isinstance(engine, SglangEngine)
        assert len(members(engine.process.pid)) >= 3, "host, scheduler, detokenizer"
        assert engine.process.folder.is_dir()
        workers(engine)[0].suspend()
        engine.process.limits = Limits(start_seconds=1.0, timeout_seconds=2.0)
        message = r"gave no answer for rollout\.engine\.timeout_seconds=2 and was ended.*; its log is (\S+)$"
        with pytest.raises(LostEngineError, match=message) as lost:
            wait_for(engine.generate(ask("hung", prompts_of(served.parts)[0])))
        assert Path(str(lost.value).rpartition(" ")[2]).stat().st_size > 0
    assert not members(engine.process.pid)
    assert not engine.process.folder.exists()


def test_an_engine_that_does_not_start_in_time_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sglang does not start: .*rollout\.engine\.start_seconds=0.1"):
        start(tiny_for("qwen3_vl"), tmp_path / "model", start_seconds=0.1)


@table(("shape", "is_compared"), [((4, 2), False), ((2, 4), False), ((4, 4), True), ((6, 4), True)])
def test_the_parameters_of_a_worker_that_are_not_sharded_are_compared(
    shape: tuple[int, int], is_compared: bool
) -> None:
    """Several workers share a weight by rows or by columns; an embedding has rows that were not sent."""
    model, weight = nn.Module(), torch.arange(16.0).view(4, 4)
    model.o_proj = nn.Linear(*reversed(shape), bias=False)
    nn.init.zeros_(model.o_proj.weight)
    sent = {"o_proj.weight": Sent(4, 16, int(value_hash(weight, torch.float32)))}
    assert bool(differences(model, sent, torch.float32)) == is_compared
    if is_compared:
        model.o_proj.weight.data[:4] = weight
        assert differences(model, sent, torch.float32) == ""
