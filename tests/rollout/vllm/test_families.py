"""Families and adapters of vLLM only, against transformers and peft after several weight syncs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fovea.config.model import Lora, Model
from fovea.errors import EngineError
from fovea.models.adapter_files import ADAPTER_WEIGHTS
from fovea.models.plain import PlainVLM
from fovea.models.tiny import TinyParts
from fovea.models.trainable import choose_trainable, lora_layers, trainable_parameters
from fovea.models.weights_to_sync import merged_weights_to_sync, weights_to_sync
from fovea.rollout.vllm.arguments import check_delta_nets
from fovea.types import Completion, Request
from fovea.weights.sync import WeightSender
from fovea_gym.errors import ConfigError
from fovea_gym.utils.event_loop import wait_for
from fovea_tools.families.tiny import save_tiny_kind
from gym_tests.tables import table
from tests.adapters import OTHER_NAMES, rename_tensors, save_adapter
from tests.hub_models import Loaded, assert_scored
from tests.reference import reference_logprobs
from tests.rollout.engine_suite import ask, check_draws, prompts_of
from tests.rollout.engines.under_test import serving
from tests.tiny_models import CORPUS, tiny


@torch.no_grad()
def test_logprobs_of_glm_equal_transformers_after_two_weight_syncs(tmp_path: Path) -> None:
    """Its decoder has gate and up in one weight, and its tower fuses them."""
    parts = Loaded.of(save_tiny_kind("glm4v", tmp_path / "files", CORPUS))
    with serving(parts, tmp_path / "model") as served:
        for version in (1, 2):
            served.sync(version)
            requests = [ask(f"{version}/{place}", prompt, n=2) for place, prompt in enumerate(parts.prompts)]
            vlm = PlainVLM(parts.network, parts.processor.banned_ids)
            assert_scored(vlm, parts.prompts, served.generate(*requests))
            for weight in parts.network.parameters():
                weight.add_(torch.randn_like(weight) * 0.02)


LIMIT = 0.05
"""Of the mean difference of log-probs; that of transformers in bfloat16 is .01 to .03."""


@torch.no_grad()
def change(network: nn.Module, by: float) -> None:
    """Add noise to all weights, and round them to bfloat16."""
    for weight in network.parameters():
        weight.copy_((weight + torch.randn_like(weight) * by).bfloat16())


@torch.no_grad()
def mean_difference(parts: TinyParts, request: Request, completions: Sequence[Completion]) -> float:
    expected = [reference_logprobs(parts, request.prompt, each.token_ids_T) for each in completions]
    found = torch.from_numpy(np.concatenate([each.logprobs_T for each in completions]))
    return float((found - torch.cat(expected)).abs().mean())


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_logprobs_of_qwen3_5_are_those_of_the_weights_of_the_last_weight_sync(family: str, tmp_path: Path) -> None:
    """vLLM's CPU build has kernels of delta nets for bfloat16 and heads of 64 or more."""
    parts = tiny(family, hidden_size=256)
    change(parts.network, 0)
    with serving(parts, tmp_path / "model", dtype="bfloat16") as served:
        for version in (1, 2):
            served.sync(version)
            requests = [ask(f"{version}/{place}", prompt, n=2) for place, prompt in enumerate(prompts_of(parts))]
            sampled = list(zip(requests, served.generate(*requests), strict=True))
            assert max(mean_difference(parts, *each) for each in sampled) < LIMIT
            change(parts.network, 0.02)
            assert min(mean_difference(parts, *each) for each in sampled) > 4 * LIMIT


@table(
    ("settings", "takes_adapters", "message"),
    [
        ({}, False, r"model.dtype=float32, but x has delta nets, .* in bfloat16 only; set model.dtype=bfloat16"),
        ({"dtype": "bfloat16"}, True, r"enable_lora=true, but x has delta nets, .*; set .*enable_lora=false"),
    ],
)
def test_what_vllm_does_not_run_is_refused(settings: dict[str, str], takes_adapters: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_delta_nets(Model(path="x", **settings), on_cpu=True, takes_adapters=takes_adapters)


LORA = Lora(rank=4, alpha=8)


@pytest.mark.parametrize("enable_lora", [True, False])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_run_that_starts_from_an_adapter_under_other_names_draws_as_peft_with_it(
    family: str, enable_lora: bool, tmp_path: Path
) -> None:
    """The folder of each version, taken by the trainer and synced, beside the weights and merged into them."""
    modules = ("q_proj", "v_proj", "down_proj")
    lora = Lora(adapter=str(tmp_path / "adapter"), rank=4, alpha=12, targets=modules)
    with serving(tiny(family), tmp_path / "model", lora=lora, enable_lora=enable_lora) as served:
        # what vLLM draws is compared with this network, into which peft itself has put the adapter
        pattern = rf".*language_model.*\.({'|'.join(modules)})"
        save_adapter(served.parts.network, tmp_path / "adapter", target_modules=pattern)
        todays = (tmp_path / "adapter" / ADAPTER_WEIGHTS).read_bytes()
        for version, (old, new) in enumerate([("", ""), *OTHER_NAMES], start=1):
            (tmp_path / "adapter" / ADAPTER_WEIGHTS).write_bytes(todays)
            rename_tensors(tmp_path / "adapter", old, new)
            network = tiny(family).network
            choose_trainable(network, Model(path="x", lora=lora), seed=0)
            weights = weights_to_sync if enable_lora else merged_weights_to_sync
            wait_for(WeightSender(partial(weights, network), [served.engine]).sync(version))
            check_draws(served, version)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_an_adapter_that_is_pushed_alone_draws_as_transformers_with_it(family: str, tmp_path: Path) -> None:
    # the files are those of the model without adapters
    with serving(tiny(family), tmp_path / "model", lora=LORA, enable_lora=True) as served:
        engine, network = served.engine, served.parts.network
        choose_trainable(network, Model(path="x", lora=LORA), seed=0)
        sync = WeightSender(lambda: weights_to_sync(network), [engine])
        before = {name: weight.clone() for name, weight in network.named_parameters() if ".lora_A" in name}
        for version in (1, 2, 3):
            with torch.no_grad():
                for layer in lora_layers(network).values():
                    layer.lora_B["default"].weight.normal_(std=0.1)
            report = wait_for(sync.sync(version))
            check_draws(served, version)
            brought = network.parameters() if version == 1 else trainable_parameters(network).values()
            assert report.bytes_copied == sum(weight.nbytes for weight in brought)
        for name, weight in before.items():
            assert torch.equal(network.get_parameter(name), weight), "vLLM changed the trainer's adapter"
        whole = {name: tuple(weight.shape) for name, weight in trainable_parameters(network).items()}
        half = {name: shape for name, shape in whole.items() if ".lora_A" in name}
        other = whole | {"model.language_model.layers.0.other.weight": (1,)}
        for shapes, message in ((half, "layers have only one, first model"), (other, "sent vLLM does not have")):
            with pytest.raises(EngineError, match=message):
                engine.begin_sync(shapes)
        assert engine.has_weights, "nothing was changed"
        check_draws(served, version)
