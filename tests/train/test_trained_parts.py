"""Parts of the model that are trained each in its own way: learning rates apart, adapters on the vision."""

from __future__ import annotations

import pytest
import torch

from fovea.config.model import Lora, Model, TinyModel
from fovea.models.modules import family_of_network
from fovea.models.trainable import choose_trainable, part_of, trainable_parameters
from tests.policies import (
    APART,
    GRADIENT_TOLERANCE,
    RATES,
    make_batch,
    make_policy,
    update_gradients,
    written_out_gradients,
)
from tests.reference import largest_relative_difference
from tests.tiny_models import FAMILIES, tiny

EVERYWHERE = Lora(rank=4, parts=("language_model", "vision_tower", "projector"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, EVERYWHERE], ids=["weights", "adapters"])
def test_tower_and_projector_move_as_in_runs_with_their_learning_rates(lora: Lora | None, family: str) -> None:
    """In the first update, where the gradient is the same."""

    def updated(**train: object) -> dict[str, torch.Tensor]:
        parts = tiny(family)
        choose_trainable(parts.network, Model(tiny=TinyModel(), lora=lora), seed=0)
        policy = make_policy(parts, **train)
        policy.update(make_batch(parts))
        return dict(trainable_parameters(policy.vlm))

    by_rate = {rate: updated(learning_rate=rate) for rate in RATES.values()}
    apart, seen, model = updated(**APART), set[str](), family_of_network(tiny(family).network)
    for name, weight in apart.items():
        part = part_of(name.removeprefix("network.").partition(".lora_")[0], model)
        seen.add(part)
        assert torch.equal(weight, by_rate[RATES.get(part, RATES["language model"])][name]), name
    assert seen >= RATES.keys()


@pytest.mark.parametrize("lora", [EVERYWHERE, Lora(rank=4, parts=("vision_tower",))], ids=["everywhere", "tower"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_adapters_are_those_of_the_written_out_loss(family: str, lora: Lora) -> None:
    """A micro-batch of text has none under adapters on the tower only."""
    parts = tiny(family)
    choose_trainable(parts.network, Model(tiny=TinyModel(), lora=lora), seed=0)
    with torch.no_grad():
        for name, parameter in parts.network.named_parameters():
            if "lora_B" in name:  # zero at the start, and the gradients of A with it
                parameter.normal_(std=0.03, generator=torch.Generator().manual_seed(len(name)))
    batch = make_batch(parts)
    assert [bool(group.images) for group in batch.groups] == [True, True, False]
    expected, policy = written_out_gradients(parts, batch), make_policy(parts, enable_dynamic_batch_size=False)
    assert largest_relative_difference(expected, update_gradients(policy, batch)) < GRADIENT_TOLERANCE
