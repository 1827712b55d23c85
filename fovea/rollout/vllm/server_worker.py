"""Extension of the workers of a vLLM server for training, which load weights from a folder.

`rollout.vllm.servers` calls these methods with arguments and results that are JSON-serializable.
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
    """Methods of a worker; a weight sync is a folder of safetensors files in the server's folder of weight syncs."""

    held_sync = ""
    """Name of the weight sync that the model holds completely; empty if there is none."""

    def fovea_facts(self) -> dict[str, Any]:
        """Return the properties of this server that the trainer checks (`ServerFacts`)."""
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
        """Load the files of a weight sync; returns the hashes of the loaded weights, and of those in the model now.

        With `takes_over`, it may replace the weight sync of another run. If it is refused, nothing changes, and the
        result holds only the reason, under `problem`.
        """
        # `held_sync` is empty after a start, and after a weight sync that failed halfway
        if self.held_sync and run_of(self.held_sync) != run_of(name) and not takes_over:
            return {"problem": OTHER_RUN}
        root = Path(os.environ[WEIGHTS_DIR_ENV])
        # reject paths such as "..": only files within the server's own folder may be read
        files = sorted((root / name).glob("*.safetensors")) if SYNC_NAME.fullmatch(name) else []
        if not files:
            return {
                "problem": f"there is no weight sync {name} in {root}; set rollout.engine.weights_dir to the folder "
                "that `fovea serve --for-training` was given"
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
