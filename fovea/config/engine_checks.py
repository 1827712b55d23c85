"""Settings of a rollout engine that do not go with the others."""

from __future__ import annotations

from collections.abc import Iterator

from fovea.config.backends import (
    EmbeddedEngine,
    EngineConfig,
    ServingEngine,
    SglangEngine,
    VllmEngine,
    VllmServersEngine,
)
from fovea.config.model import Lora
from fovea.config.sections import Data, Rollout

VLLM_TEMPERATURES = (0.01, 2)
"""What vLLM samples at; below the first it would do so at the first."""
VLLM_MAX_LORA_RANK = 512


def lora_complaints(engine: EngineConfig, lora: Lora | None) -> Iterator[str]:
    """Complaints about an engine that is to take adapters."""
    if not isinstance(engine, VllmEngine) or not engine.enable_lora:
        return
    if lora is None:
        yield (
            "rollout.engine.enable_lora=true pushes adapters, but the model is trained without; set model.lora, or "
            "rollout.engine.enable_lora=false"
        )
    elif lora.parts != ("language_model",):
        yield (
            f"model.lora.parts={list(lora.parts)} with rollout.engine.enable_lora=true, and vLLM takes adapters on the "
            "language model; set rollout.engine.enable_lora=false, and it gets merged weights"
        )
    elif lora.rank > VLLM_MAX_LORA_RANK:
        yield (
            f"model.lora.rank={lora.rank} with rollout.engine.enable_lora=true, and vLLM takes adapters of up to "
            f"{VLLM_MAX_LORA_RANK}; set rollout.engine.enable_lora=false, and it gets merged weights"
        )


def engine_complaints(rollout: Rollout, data: Data, *, corrected: bool) -> Iterator[str]:
    """Complaints about the engine; `corrected` is `algorithm.corrects_for_engine`."""
    if isinstance(rollout.engine, EmbeddedEngine):
        yield from _embedded(rollout.engine, corrected)
        return
    yield from _sglang(rollout) if isinstance(rollout.engine, SglangEngine) else _vllm(rollout)
    if isinstance(rollout.engine, VllmServersEngine):
        yield from _servers(rollout.engine)
    else:
        yield from _serving(rollout, rollout.engine, data, corrected)


def _embedded(engine: EmbeddedEngine, corrected: bool) -> Iterator[str]:
    if engine.decode_weights == "int8" and not corrected:
        yield (
            "rollout.engine.decode_weights=int8 draws from other probabilities than those that are trained; set "
            "algorithm.importance_sampling_fix=true, or rollout.engine.decode_weights=exact"
        )


def _servers(engine: VllmServersEngine) -> Iterator[str]:
    twice = next((each for each in engine.servers if engine.servers.count(each) > 1), None)
    if twice is not None:
        yield f"rollout.engine.servers names {twice} twice, which is no second server; leave one out"


def _vllm(rollout: Rollout) -> Iterator[str]:
    """What vLLM must draw from so that its log-probs are those that are trained."""
    name = f"rollout.engine={rollout.engine.name}"
    off = {"top_p": 1, "top_k": 0, "min_p": 0}
    for key, value in off.items():
        if getattr(rollout, key) != value:
            yield (
                f"rollout.{key}={getattr(rollout, key)} with {name}, whose log-probs are then of what it leaves, and "
                f"not of what is trained; set rollout.{key}={value}, or rollout.engine=embedded"
            )
    lowest, highest = VLLM_TEMPERATURES
    if not lowest <= rollout.temperature <= highest:
        yield (
            f"rollout.temperature={rollout.temperature:g} with {name}, which samples between {lowest} and {highest}; "
            "change it, or set rollout.engine=embedded"
        )


def _sglang(rollout: Rollout) -> Iterator[str]:
    if rollout.min_p:
        yield (
            f"rollout.min_p={rollout.min_p} with rollout.engine=sglang, which cannot draw by seed with it; set "
            "rollout.min_p=0, or rollout.engine=embedded"
        )


def _serving(rollout: Rollout, engine: ServingEngine, data: Data, corrected: bool) -> Iterator[str]:
    if engine.min_new_tokens and not corrected:
        yield (
            f"rollout.engine.min_new_tokens={engine.min_new_tokens} draws from other probabilities than those that are "
            "trained; set algorithm.importance_sampling_fix=true, or rollout.engine.min_new_tokens=0"
        )
    if engine.min_new_tokens > rollout.max_new_tokens:
        yield (
            f"rollout.engine.min_new_tokens={engine.min_new_tokens} is more than rollout.max_new_tokens="
            f"{rollout.max_new_tokens}; lower it"
        )
    longest = data.max_prompt_tokens + rollout.max_new_tokens
    if engine.max_model_len is not None and engine.max_model_len < longest:
        yield (
            f"rollout.engine.max_model_len={engine.max_model_len} is less than data.max_prompt_tokens="
            f"{data.max_prompt_tokens} and rollout.max_new_tokens={rollout.max_new_tokens} together; raise it to "
            f"{longest}, or lower those"
        )
