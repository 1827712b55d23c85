"""The recipes after verl's examples with Megatron take two steps with tiny models, divided over two processes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipe
from fovea.metrics.log import read_metrics
from gym_tests.environments.files import row
from tests.cluster.torchrun_runs import run_on
from tests.runs import HASH_REWARD
from tests.tiny_models import save, tiny
from tests.train.megatron.equal_steps import SIZES

SMALL = (
    "model.dtype=float32",
    "max_steps=2",
    "threads=1",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=2",
    "rollout.max_new_tokens=6",
    "data.max_prompt_tokens=512",
    "algorithm.minibatches=2",
    "parity.prompts=1",
    "evaluate.before_training=false",
    "evaluate.image_controls=false",
    "evaluate.shared_images=ignore",
    "evaluate.test_size=2",
    "evaluate.dev_size=2",
    "log.tensorboard=false",
    HASH_REWARD,
)
ONE_READS = ("tests.train.megatron.one_reader", "train")
BASE = "geo3k_qwen2_5_vl_7b"
CASES = {
    "megatron_qwen2_5_vl": ("qwen2_5_vl", []),
    "megatron_qwen3_vl": (
        "qwen3_vl",
        ["train.backend.tensor_parallel_size=1", "train.backend.sequence_parallel=false"],
    ),
}
"""By recipe: the family of its model, and settings with which two processes hold the model once."""


@pytest.mark.parametrize("recipe", CASES)
def test_it_takes_two_steps(recipe: str, tmp_path: Path) -> None:
    """The network of the embedded engine is read by the first process for both."""
    family, settings = CASES[recipe]
    model, file, run_dir = save(tiny(family, **SIZES), tmp_path / "model"), tmp_path / "rows.parquet", tmp_path / "run"
    rows = [row(f"How many sides have {n} squares?", str(4 * n)) for n in range(1, 13)]
    pq.write_table(pa.Table.from_pylist(rows), file)
    words = [f"run_dir={run_dir}", f"model.path={model}", f"data.cache_dir={tmp_path / 'cache'}", *SMALL, *settings]
    words += [f"environment.{split}_files=[{file}]" for split in ("train", "dev", "test")]
    run_on(2, *ONE_READS, BASE, recipe, *words)
    steps = read_metrics(run_dir)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["actions_trained"] > 0 and step["grad_norm"] > 0 for step in steps)
    given = load_config([shipped_recipe(BASE), shipped_recipe(recipe)], settings).train
    assert load_config([run_dir / "config.yaml"], []).train == given
