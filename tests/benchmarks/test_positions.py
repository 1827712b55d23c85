"""The experiment about positions: 1-D ones in the trainer are another policy than the engine's, right ones are not."""

from __future__ import annotations

from pathlib import Path

from benchmarks.positions import main
from fovea.metrics.log import read_metrics

SHORT = [
    "max_steps=1", "warmup.max_steps=1", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2",
    "evaluate.every_steps=0", "evaluate.image_controls=false", "evaluate.before_training=false", "threads=1",
    "environment.train_size=64", "environment.dev_size=4", "environment.test_size=4", "parity.prompts=0",
]  # fmt: skip


def test_one_by_one_is_another_policy_than_the_engines(tmp_path: Path) -> None:
    first = {}
    for name in ("mrope", "1d-weights"):
        main(["recipes/shapes.yaml", "--out", str(tmp_path), "--only", name, *SHORT])
        first[name] = read_metrics(tmp_path / name)[0]
    # bfloat16 alone, and positions besides
    assert 0 < 2 * first["mrope"]["rollout_train_abs/trained"] < first["1d-weights"]["rollout_train_abs/trained"]
    assert "importance/weight" in first["1d-weights"]
    assert "importance/weight" not in first["mrope"]
