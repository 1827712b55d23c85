"""LoRA's adapters on a Megatron model: where they are, and what is trained beside them.

Their steps are compared with the torch backend's in `test_equal_steps`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fovea.models.load import load_network
from fovea.models.trainable import choose_trainable, factored_weights
from tests.policies import weights_of
from tests.tiny_models import save, tiny
from tests.train.megatron.equal_steps import SIZES, megatron_policy, mixed_pairs, settings_of

PARTS = tiny("qwen3_vl", **SIZES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(PARTS, tmp_path_factory.mktemp("model"))


def with_adapters(module: Any) -> set[str]:
    """Those of Megatron's layers that have some."""
    return {
        name.split(".", 4)[-1].rpartition(".")[0] for name, _ in module.named_modules() if name.endswith(".adapter")
    }


def test_a_step_moves_what_the_torch_backend_trains(model: Path) -> None:
    given = {"lora": {"rank": 4, "exclude": ["k_proj"]}}
    config = settings_of(model, model=dict(given))
    network = load_network(config.model)
    choose_trainable(network, config.model, config.seed)
    trained = {name for name, weight in factored_weights(network) if weight.requires_grad}
    with megatron_policy(model, model=given) as policy:  # type: ignore[arg-type]
        before = {name: weight.detach().clone() for name, weight in weights_of(policy).items()}
        for _ in range(2):  # the first step moves one of the two matrices only
            policy.sft(mixed_pairs(PARTS))
        after = weights_of(policy)
        assert {weight.name for weight in policy.weights_to_sync() if weight.is_trained} == trained
    assert {name for name, weight in before.items() if not torch.equal(after[name], weight)} == trained


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"exclude": ["mlp"]}, {"self_attention.linear_qkv", "self_attention.linear_proj"}),
        ({"targets": ["v_proj"]}, {"self_attention.linear_qkv"}),
        ({"targets": ["down_proj", "up_proj"]}, {"mlp.linear_fc1", "mlp.linear_fc2"}),
    ],
)
def test_layers_that_are_left_out_have_none(settings: dict[str, list[str]], layers: set[str], model: Path) -> None:
    with megatron_policy(model, model={"lora": settings}) as policy:  # type: ignore[dict-item]
        assert with_adapters(policy._model.module) == layers
