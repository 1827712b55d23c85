"""Plans of small models, and the activations that autograd keeps of them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from fovea.config.run import Config
from fovea.models.shared_prefix.layout import PackedRow
from fovea.models.vlm import VLM

GROUPS, SAMPLES, TOKENS = 6, 4, 12


def config_for(folder: Path, prompt_tokens: int, image_tokens: int, tokens: int = TOKENS, **train: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder)},
            "rollout": {"prompts_per_step": GROUPS, "samples_per_prompt": SAMPLES, "max_new_tokens": tokens},
            "plan": {"gpu": "cpu", "gpus": 1, "prompt_tokens": prompt_tokens, "image_tokens": image_tokens},
            "train": {"max_tokens_per_microbatch": 10**6, **train},
        }
    )


def saved_bytes(vlm: VLM, row: PackedRow) -> int:
    """Bytes that autograd keeps of a row beside the weights."""
    kept: dict[int, UntypedStorage] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        vlm(row, temperature=1.0, chunk_tokens=10**6)
    weights = {parameter.untyped_storage().data_ptr() for parameter in vlm.parameters()}
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in weights)
