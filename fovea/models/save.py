"""Conversion of a network under training into an unmodified transformers model, to be saved."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fovea.models.model_files import no_progress_bar
from fovea.models.modules import config_of
from fovea.models.policy_network import PolicyNetwork
from fovea.models.trainable import merged_weights
from fovea.models.transformers_versions import OLD
from fovea.types import Weights

EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
"""Ends of the names of Qwen3-VL-MoE's experts, which files hold as [experts, inputs, outputs]. transformers 5 holds
[experts, outputs, inputs], reads both and writes its own; vLLM, SGLang and LMDeploy read that of the files alone."""


def is_turned(name: str) -> bool:
    """Whether files of the hub hold a weight in another layout than this transformers does."""
    return name.endswith(EXPERTS) and not OLD


def in_hub_layout(experts: Tensor) -> Tensor:
    """A view [experts, inputs, outputs] of such a weight."""
    return experts.transpose(1, 2)


def plain_network(network: PreTrainedModel, weights: Weights | None = None) -> PreTrainedModel:
    """An unmodified transformers model with `weights`.

    By default these are the network's own with adapters merged; weights without an adapter are shared, not copied.
    """
    # a config rebuilt from its dict drops the name of our attention implementation, which transformers does not know
    config = type(config_of(network)).from_dict(config_of(network).to_dict())
    # on the meta device, so that no memory is taken for weights that are assigned right after
    with torch.device("meta"):
        plain: PreTrainedModel = type(network)(config)
    merged = dict(merged_weights(network) if weights is None else weights)
    loaded = plain.load_state_dict(merged, strict=False, assign=True)
    # a tied lm_head gets its weight from the embedding
    assert set(loaded.missing_keys) <= {"lm_head.weight"}, loaded
    assert not loaded.unexpected_keys, loaded
    plain.tie_weights()
    return plain


def save_network(vlm: PolicyNetwork, folder: Path, weights: Weights | None = None) -> None:
    """Write config and `weights` (by default the merged ones) in the layout of the hub's own files.

    generation_config.json lists the banned ids under `suppress_tokens`, so that transformers' generate draws from the
    distribution that was trained.
    """
    plain = plain_network(vlm.network, weights)
    plain.generation_config = copy.deepcopy(vlm.network.generation_config)
    assert plain.generation_config is not None
    plain.generation_config.suppress_tokens = list(vlm.banned_ids) or None
    save_in_hub_layout(plain, folder)


def save_in_hub_layout(network: PreTrainedModel, folder: Path) -> None:
    """Write config and weights of an unmodified transformers model as the hub's files hold them."""
    tensors = network.state_dict()
    experts = {name: in_hub_layout(x).contiguous() for name, x in tensors.items() if is_turned(name)}
    with no_progress_bar():
        if experts:
            # transformers would turn them back again
            network.save_pretrained(folder, state_dict=tensors | experts, save_original_format=False)
        else:
            network.save_pretrained(folder)
