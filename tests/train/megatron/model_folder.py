"""Writes tiny models as `fovea export` does, or reads such folders, in whichever environment runs this module.

    python -m tests.train.megatron.model_folder FOLDER NEW OUT OUT_OF_NEW

FOLDER has a model folder of each family and NEW gets them; OUT and OUT_OF_NEW get an .npz of each that is read.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

from fovea.commands.exporting.export import write_model
from fovea.commands.targets import OpenedModel
from fovea.config.loading import load_config
from fovea.models.processor import load_processor
from fovea.models.tiny import TinyParts
from fovea.train.packing import pack_row
from fovea.wiring.model import open_vlm
from tests.tiny_models import CPU, mixed_prompts, save, tiny

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
ANSWER = np.array([5, 17, 3, 40])
VERSION_5 = Path(os.environ.get("FOVEA_TRANSFORMERS_5_PYTHON", ".venv/bin/python"))
"""Interpreter of the environment that everything but Megatron runs in."""
PATIENCE = 300.0


def exchange(read: Path, written: Path, out: Path, out_of_new: Path) -> None:
    """Run this module with transformers 5."""
    command = [VERSION_5, "-m", "tests.train.megatron.model_folder", read, written, out, out_of_new]
    done = subprocess.run(command, timeout=PATIENCE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def write(folder: Path) -> None:
    for family in FAMILIES:
        own = save(tiny(family), folder / f"{family}-as-the-library-saves-it")
        (folder / family).mkdir()
        write_model(folder / family, opened(own))


def read_all(folder: Path, out: Path) -> None:
    for family in FAMILIES:
        np.savez(out / f"{family}.npz", **read(folder / family))


def read(folder: Path) -> dict[str, np.ndarray]:
    """What the model of a folder makes of prompts with no, one and two images."""
    model = opened(folder)
    prompts = mixed_prompts(TinyParts(network=model.vlm.network, processor=model.processor))
    row = pack_row(model.processor.family, prompts, [[ANSWER]] * len(prompts), CPU)
    with torch.no_grad():
        scores = model.vlm(row, temperature=1.0, chunk_tokens=100)
    tensors = [x for prompt in prompts for each in prompt.images for x in each.tensors.values()]
    return {
        "version": np.array(transformers.__version__),
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
    given, new, found, found_in_new = map(Path, sys.argv[1:])
    write(new)
    read_all(given, found)
    read_all(new, found_in_new)
