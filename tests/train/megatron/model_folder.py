"""Writes a model folder, or reads one, in whichever environment runs this module.

    python -m tests.train.megatron.model_folder write FAMILY FOLDER
    python -m tests.train.megatron.model_folder read FOLDER OUT.npz
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from fovea.build.model import open_vlm
from fovea.build.targets import OpenedModel
from fovea.config.loading import load_config
from fovea.exporting.export import write_model
from fovea.models.processor import load_processor
from fovea.models.tiny import TinyParts
from fovea.train.packing import pack_row
from tests.tiny_models import CPU, mixed_prompts, save, tiny

ANSWER = np.array([5, 17, 3, 40])


def main() -> None:
    match sys.argv[1:]:
        case ["write", family, folder]:
            write(family, Path(folder))
        case ["read", folder, out]:
            np.savez(out, **read(Path(folder)))
        case _:
            raise SystemExit(__doc__)


def write(family: str, folder: Path) -> None:
    """Write a tiny model as `fovea export` does, from a folder in the layout of this environment's transformers."""
    write_model(folder, opened(save(tiny(family), folder.with_name(f"{folder.name}-own"))))


def read(folder: Path) -> dict[str, np.ndarray]:
    """What the model of a folder makes of prompts with no, one and two images."""
    model = opened(folder)
    prompts = mixed_prompts(TinyParts(network=model.vlm.network, processor=model.processor))
    row = pack_row(model.processor.family, prompts, [[ANSWER]] * len(prompts), CPU)
    with torch.no_grad():
        scores = model.vlm(row, temperature=1.0, chunk_tokens=100)
    tensors = [x for prompt in prompts for each in prompt.images for x in each.tensors.values()]
    return {
        "token_ids": np.concatenate([prompt.token_ids_L for prompt in prompts]),
        "images": np.concatenate([np.ravel(x) for x in tensors]),
        "positions": row.positions_3N.numpy(),
        "logprobs": scores.logprobs_A.numpy(),
    }


def opened(folder: Path) -> OpenedModel:
    config = load_config([], [f"model.path={folder}", "model.dtype=float32", "environment.name=shapes"])
    assert config.model.path is not None
    processor = load_processor(config.model)
    return OpenedModel(config=config, processor=processor, vlm=open_vlm(config, config.model, processor.banned_ids))


if __name__ == "__main__":
    main()
