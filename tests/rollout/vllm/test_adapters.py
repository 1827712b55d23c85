"""LoRA in place: base weights once, then adapters alone, against transformers with peft's adapters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea.config.model import Lora, Model
from fovea.errors import EngineError
from fovea.models.adapter_files import ADAPTER_WEIGHTS
from fovea.models.trainable import choose_trainable, lora_layers, trainable_parameters
from fovea.models.weights_to_sync import merged_weights_to_sync, weights_to_sync
from fovea.weights.sync import WeightSender
from fovea_gym.utils.event_loop import wait_for
from tests.adapters import OTHER_NAMES, rename_tensors, save_adapter
from tests.rollout.engine_suite import TOLERANCE, ask, prompts_of
from tests.rollout.engines.serving import serving
from tests.tiny_models import tiny

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
            requests = [ask(f"{version}/{place}", prompt, n=2) for place, prompt in enumerate(prompts_of(served.parts))]
            for request, completions in zip(requests, served.generate(*requests), strict=True):
                assert served.largest_difference(request, completions) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_an_adapter_that_is_pushed_alone_draws_as_transformers_with_it(family: str, tmp_path: Path) -> None:
    # the files are those of the model without adapters
    with serving(tiny(family), tmp_path / "model", lora=LORA, enable_lora=True) as served:
        engine: Any = served.engine
        network = served.parts.network
        choose_trainable(network, Model(path="x", lora=LORA), seed=0)
        sync = WeightSender(lambda: weights_to_sync(network), [engine])
        before = {name: weight.clone() for name, weight in network.named_parameters() if ".lora_A" in name}
        for version in (1, 2, 3):
            with torch.no_grad():
                for layer in lora_layers(network).values():
                    layer.lora_B["default"].weight.normal_(std=0.1)
            report = wait_for(sync.sync(version))
            # the same requests each time: nothing of older weights is left in a cache
            requests = [ask(f"{version}/{place}", prompt, n=2) for place, prompt in enumerate(prompts_of(served.parts))]
            for request, completions in zip(requests, served.generate(*requests), strict=True):
                assert {c.version for c in completions} == {version}
                assert served.largest_difference(request, completions) < TOLERANCE
            adapters = trainable_parameters(network).values()
            everything = list(network.parameters())
            brought = everything if version == 1 else adapters
            assert report.bytes_copied == sum(weight.nbytes for weight in brought)
        for name, weight in before.items():
            assert torch.equal(network.get_parameter(name), weight), "vLLM changed the trainer's adapter"
        half = {name: tuple(w.shape) for name, w in trainable_parameters(network).items() if ".lora_A" in name}
        with pytest.raises(EngineError, match="layers have only one, first model"):
            engine.begin_sync(half)
        whole = {name: tuple(weight.shape) for name, weight in trainable_parameters(network).items()}
        with pytest.raises(EngineError, match="that were sent vLLM does not have"):
            engine.begin_sync(whole | {"model.language_model.layers.0.other.weight": (1,)})
        assert engine.has_weights, "nothing was changed"
        assert served.largest_difference(requests[0], served.generate(requests[0])[0]) < TOLERANCE
