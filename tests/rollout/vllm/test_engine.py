"""What only vLLM has: its arguments, its fused weights, its cache, its own environment, runs, and its parsers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from fovea.config.backends import VllmSettings
from fovea.config.loading import load_config
from fovea.config.model import Model
from fovea.config.run import Config
from fovea.errors import EngineError
from fovea.models.render import as_listed
from fovea.rollout.remote_engine import RemoteEngine
from fovea.rollout.vllm.arguments import engine_arguments
from fovea.rollout.vllm.engine import VllmEngine
from fovea.wiring.engine import make_streamed
from fovea_gym.errors import ConfigError
from fovea_gym.tools.calls.gemma_calls import GemmaCalls
from fovea_gym.tools.calls.json_calls import JsonCalls
from fovea_gym.tools.calls.xml_calls import XmlCalls
from fovea_gym.utils.event_loop import wait_for
from fovea_tools.plan.plan import make_plan
from gym_tests.tables import table
from tests.rollout.engine_suite import LIMIT_TOKENS, EngineSuite, Served
from tests.rollout.engines.on_vllm import ENGINE, arguments
from tests.rollout.engines.under_test import served_by, start, sync, tiny_for
from tests.rollout.short_runs import APART, QUICK, TRAINS, check_exact, train
from tests.runs import SMALL, untimed
from tests.tiny_models import save, tiny
from tests.utils.tool_calls.fuzzed import fuzzed


def test_further_arguments_reach_vllm_beside_the_settings() -> None:
    made = arguments({"block_size": 32})
    assert (made["block_size"], made["max_model_len"], made["seed"]) == (32, 100, 3)


def test_the_reason_of_a_refusal_is_told(tmp_path: Path) -> None:
    """By vLLM's settings, which pydantic checks."""
    with pytest.raises(ConfigError, match=r"does not start: ValidationError: cache_dtype: Input should be 'auto'"):
        start(tiny("qwen3_vl"), tmp_path, engine_args={"kv_cache_dtype": "float1"})


@table("gpus", [[0], [3], [2, 3]])
def test_each_process_gives_vllm_its_own_gpus(gpus: list[int], tmp_path: Path) -> None:
    """As vLLM itself resolves its arguments; by default the workers of every process begin at GPU 0."""
    model = Model(path=str(save(tiny("qwen3_vl"), tmp_path)))
    settings = VllmSettings(tensor_parallel_size=len(gpus))
    made = engine_arguments(settings, model, max_model_len=100, seed=3, gpus=gpus)
    parallel = EngineArgs(**made).create_engine_config().parallel_config
    assert (parallel.assigned_physical_gpu_ids, parallel.world_size) == (gpus, len(gpus))


def test_a_weight_sync_of_half_a_fused_weight_is_refused(shared: VllmEngine) -> None:
    """q without k and v."""
    sync(shared, tiny_for("qwen3_vl", num_kv_heads=2), 20)
    with pytest.raises(EngineError, match=r"\b2 that .*k_proj\.weight"):
        shared.begin_sync({"model.language_model.layers.0.self_attn.q_proj.weight": (64, 64)})


def test_a_plan_knows_the_tokens_of_the_cache(shared: VllmEngine) -> None:
    """By the numbers that vLLM has made of `kv_cache_gib`; pages that do not fit whole are left out."""
    cache = shared.llm.vllm_config.cache_config
    assert cache.num_gpu_blocks is not None
    config = Config.model_validate(
        {
            "model": {"path": str(shared.llm.model_config.model)},
            "rollout": {"engine": {"name": "vllm"} | ENGINE.small},
            "plan": {"gpu": "cpu", "gpus": 1},
        }
    )
    room = make_plan(config).room
    assert room is not None
    assert 0 <= room.cache_tokens - cache.num_gpu_blocks * cache.block_size < cache.block_size


class TestInAnotherProcess(EngineSuite):
    """As where the trainer's environment has no vLLM."""

    @pytest.fixture(scope="class")
    def served(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        parts = tiny("qwen3_vl")
        given = [f"model.path={save(parts, tmp_path_factory.mktemp('model'))}", "model.dtype=float32"]
        given += ["environment=shapes", "data.max_prompt_tokens=400", *ENGINE.run_settings]
        given += [f"rollout.engine.max_model_len={LIMIT_TOKENS}", f"rollout.engine.python={sys.executable}"]
        config = load_config([], given)
        assert isinstance(config.rollout.engine, VllmSettings)
        engine = make_streamed(config, config.rollout.engine, config.model, parts.processor)
        assert isinstance(engine, RemoteEngine)
        made = served_by(engine, parts)
        try:
            made.sync(7)
            yield made
        finally:
            wait_for(engine.close())


def test_two_processes_draw_with_an_engine_each(tmp_path: Path) -> None:
    train("shapes", tmp_path, *SMALL, *ENGINE.run_settings, "max_steps=2", processes=2)
    check_exact(tmp_path, "vllm", 2)


def test_rollouts_ahead_carry_the_version_that_drew_them(tmp_path: Path) -> None:
    ahead = ("rollout.max_staleness_steps=1", "checkpoint.every_steps=4", "max_steps=4")
    train("shapes", tmp_path, *SMALL, *ENGINE.run_settings, *QUICK, *TRAINS, *APART, *ahead, processes=2)
    rows = untimed(tmp_path)
    assert [row["staleness/mean"] for row in rows] == [0, 1, 1, 1]
    # the engine's log-probs are the old ones, of weights a step behind
    is_exact = [row["ratio_mean"] == pytest.approx(1, abs=1e-5) for row in rows]
    assert is_exact == [True, False, False, False]


NUM_FUZZED = 500
MARKS = {mark: index for index, mark in enumerate(("<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>"))}


@table(("parser", "calls_of"), [("hermes", JsonCalls()), ("qwen3_coder", XmlCalls()), ("gemma4", GemmaCalls())])
def test_fuzzed_tool_calls_are_read_as_by_vllm(parser: str, calls_of: Any) -> None:
    tokenizer: Any = SimpleNamespace(
        get_vocab=lambda: MARKS, encode=lambda text, **_: [MARKS.get(text, 9)], decode=lambda ids, **_: ""
    )
    for seed in range(NUM_FUZZED):
        tools, text, calls = fuzzed(seed)
        if parser == "gemma4":
            # vLLM reads numbers within an object whose schema names no properties as texts; transformers does not
            calls = [call for call in calls if not any(isinstance(value, dict) for value in call.arguments.values())]
        written = calls_of.written(text, calls)
        request = ChatCompletionRequest(messages=[], tools=[as_listed(tool) for tool in tools])
        vllms = ToolParserManager.get_tool_parser(parser)(tokenizer, request.tools)
        theirs = vllms.extract_tool_calls(written, request).tool_calls
        read = [(each.function.name, json.loads(each.function.arguments)) for each in theirs]
        ours = [(each.name, each.arguments) for each in calls_of.parse(written, tools)]
        assert ours == read == [(call.name, call.arguments) for call in calls], seed
