"""Conversion of a network under training into an unmodified transformers model, to be saved."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from fovea.models.model_files import no_progress_bar
from fovea.models.modules import config_of
from fovea.models.trainable import merged_weights
from fovea.types import Weights


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
    plain.generation_config = network.generation_config
    return plain


def save_network(network: PreTrainedModel, folder: Path, weights: Weights | None = None) -> None:
    """Write config and `weights` (by default the merged ones) as transformers reads them."""
    with no_progress_bar():
        plain_network(network, weights).save_pretrained(folder)
