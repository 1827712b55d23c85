"""Settings of a short run of a tiny model on rows of files."""

from __future__ import annotations

SMALL = [
    *("model.path=null", "model.tiny={hidden_size: 32, num_layers: 1}", "model.dtype=float32"),
    *("model.max_pixels=2304", "max_steps=2", "log.progress=false", "log.tensorboard=false"),
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=4"),
    *("algorithm.max_groups_without_signal=4", "algorithm.entropy_coef=0.01"),
    *("evaluate.test_size=4", "evaluate.image_controls=false", "evaluate.shared_images=ignore"),
    *("train.gradient_checkpointing=none", "train.learning_rate=1e-3"),
]
