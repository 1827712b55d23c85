"""Additions to the workers of a vLLM server for training: weights are sent through a folder.

`rollout.vllm.servers` calls these methods, with arguments and results that JSON holds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from fovea.rollout.vllm.server import WEIGHTS_DIR_ENV
from fovea.rollout.vllm.sync_folder import OTHER_RUN, SYNC_NAME, run_of
from fovea.rollout.vllm.worker import Slices, WeightReceiver


class FolderReceiver(WeightReceiver):
    """Methods of a worker; a weight sync is a folder of safetensors files below the server's own folder of weight syncs."""

    held_sync = ""
    """The weight sync that the model holds, whole."""

    def fovea_facts(self) -> dict[str, Any]:
        """Facts of this server for the trainer (`ServerFacts`)."""
        config = self.vllm_config.model_config
        media = config.multimodal_config
        return {
            "dtype": str(config.dtype).removeprefix("torch."),
            "logprobs_mode": config.logprobs_mode,
            "normalizes_pixels": bool(media.mm_device_do_normalize),
            "max_model_len": config.max_model_len,
            "max_images": media.get_limit_per_prompt("image"),
            "held_sync": self.held_sync,
        }

    def load_sync(self, name: str, takes_over: bool, slices: Slices) -> dict[str, Any]:
        """Load the files of a weight sync; returns the hashes of what arrived, and of what the model holds now.

        A run's first weight sync here takes over from another run's. Under `problem`, why the weight sync is not loaded; nothing has
        changed then.
        """
        # none is held after a start, or a weight sync that broke off
        if self.held_sync and run_of(self.held_sync) != run_of(name) and not takes_over:
            return {"problem": OTHER_RUN}
        root = Path(os.environ[WEIGHTS_DIR_ENV])
        # a name, and no path such as "..": nothing outside of the server's own folder is read
        files = sorted((root / name).glob("*.safetensors")) if SYNC_NAME.fullmatch(name) else []
        if not files:
            return {
                "problem": f"no weight sync {name} in {root}; rollout.engine.weights_dir must be the folder that `fovea serve "
                "--for-training` was given"
            }
        self.held_sync = ""
        self.begin_sync()
        names: list[str] = []
        for file in files:
            weights = load_file(file)
            self.receive_weights(list(weights.items()))
            names += weights
        # a shard of a parameter cannot be compared with the whole
        arrived, held = self.finish_sync({} if self.vllm_config.parallel_config.world_size > 1 else slices)
        self.held_sync = name
        return {"arrived": dict(zip(names, arrived, strict=True)), "held": held}
