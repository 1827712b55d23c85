"""Whole runs with train.backend=megatron in their own processes: embedded, with engines of others, by recipes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForImageTextToText

from fovea.commands.evaluate import EvalSet, compare
from fovea.commands.exporting.export import export
from fovea.commands.targets import parse_target, shared_settings
from fovea.config.loading import load_config
from fovea.config.model import Model
from fovea.config.recipes import shipped_recipe
from fovea.metrics.log import read_metrics
from fovea.models.adapter_files import ADAPTER_WEIGHTS
from fovea.models.load import load_network
from fovea.models.trainable import choose_trainable, factored_weights
from fovea.report.about import CONFIG_FILE
from fovea.utils.checksum import bit_hash, combined
from fovea_gym.errors import ConfigError
from gym_tests.environments.files import row
from tests.cluster.torchrun_runs import run_on
from tests.policies import weights_of
from tests.rollout.serve_command import serving
from tests.rollout.short_runs import check_exact
from tests.runs import HASH_REWARD, untimed, wait_for_steps
from tests.tiny_models import save, tiny
from tests.train.megatron.commands import SHAPES, environment, fovea
from tests.train.megatron.equal_steps import SIZES, megatron_policy
from tests.warm import WarmProcess


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps in one process."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    fovea(folder)
    return folder


def test_the_engine_samples_with_the_weights_of_each_step(straight: Path) -> None:
    """The embedded engine has its own tensors: the log-probs of every step are those of the newest weights."""
    check_exact(straight, "embedded", steps=4)


def test_a_killed_run_goes_on_as_if_it_had_not_been(straight: Path, tmp_path: Path) -> None:
    """kill -9 behind a checkpoint, which leaves no process; metrics have sums over all weights."""
    run_dir = tmp_path / "run"
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = WarmProcess([*SHAPES, f"run_dir={run_dir}"], environment(), **pipes)
    try:
        wait_for_steps(run_dir, 3, process)
        others = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(others, timeout=10)
    assert left == []
    assert not (run_dir / "summary.json").exists(), "it had ended"
    fovea(run_dir, "resume=auto")
    assert untimed(run_dir) == untimed(straight)
    assert len({row["weights_checksum"] for row in untimed(run_dir)}) == 4


@pytest.fixture(scope="module")
def exported(straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    done = export(straight, folder, trust=True)
    assert done.max_logprob_difference < 1e-4
    assert done.left_out == ()
    return folder


def test_an_export_has_the_weights_that_the_engine_was_given(straight: Path, exported: Path) -> None:
    tensors = AutoModelForImageTextToText.from_pretrained(exported, dtype=torch.float32).state_dict()
    with megatron_policy(exported) as policy:
        # in the order of a weight sync
        synced = [weight.name for weight in policy.weights_to_sync() if weight.is_trained]
    found = combined(int(bit_hash(tensors[name])) for name in synced)
    assert found == read_metrics(straight)[-1]["weights_checksum"]


def test_either_backend_goes_on_from_an_export(exported: Path) -> None:
    network = load_network(Model(path=str(exported), dtype="float32"))
    by_torch = dict(network.named_parameters())
    with megatron_policy(exported) as policy:
        by_megatron = weights_of(policy)
    assert by_torch.keys() == by_megatron.keys()
    assert all(torch.equal(by_megatron[name], weight) for name, weight in by_torch.items())


def test_a_checkpoint_answers_as_its_export_does(straight: Path, exported: Path) -> None:
    found = [parse_target(str(target)) for target in (straight, exported)]
    config = shared_settings(found, None, ["evaluate.test_size=4"])
    answers = compare(found, EvalSet.of(config, "test"), [], lambda _: None, trust=True).targets
    texts = [[(row.id, row.answers[0].text) for row in each.greedy.values()] for each in answers]
    assert len(texts[0]) == 4
    assert texts[0] == texts[1]


def test_a_checkpoint_is_read_by_trust_alone(straight: Path, tmp_path: Path) -> None:
    """A pickle is among its files."""
    with pytest.raises(ConfigError, match=r"contains a pickle, .* add trust=True if the run is your own"):
        export(straight, tmp_path / "model")


LORA = (
    *("model.lora.rank=4", "model.lora.exclude=[layers.1.mlp]", "model.tiny=null", "model.dtype=float32"),
    *("algorithm.kl.name=loss", "algorithm.kl.coef=0.01", "warmup=null"),
)


@pytest.fixture(scope="module")
def with_adapters(straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of adapters on the model that another run began with, which is in a folder."""
    folder = tmp_path_factory.mktemp("adapters") / "run"
    fovea(folder, *LORA, f"model.path={straight / 'model'}")
    return folder


def test_the_engine_samples_with_the_adapters_of_each_step(with_adapters: Path) -> None:
    check_exact(with_adapters, "embedded", steps=4)
    assert len({row["weights_checksum"] for row in untimed(with_adapters)}) == 4


@pytest.mark.parametrize("adapter_only", [False, True])
def test_adapters_are_exported_merged_and_alone(with_adapters: Path, adapter_only: bool, tmp_path: Path) -> None:
    """The check of an export compares log-probs of the folder, reloaded by transformers and peft."""
    done = export(with_adapters, tmp_path / "model", adapter_only=adapter_only, trust=True)
    assert done.max_logprob_difference < 1e-4
    assert (tmp_path / "model" / ADAPTER_WEIGHTS).exists() == adapter_only


def test_either_backend_goes_on_from_an_exported_adapter(with_adapters: Path, tmp_path: Path) -> None:
    export(with_adapters, tmp_path / "adapter", adapter_only=True, trust=True)
    config = load_config([with_adapters / CONFIG_FILE], [f"model.lora.adapter={tmp_path / 'adapter'}"])
    network = load_network(config.model)
    choose_trainable(network, config.model, seed=1)
    by_torch = dict(factored_weights(network))
    with megatron_policy(Path(config.model.path or ""), model={"lora": config.model.lora}) as policy:
        by_megatron = weights_of(policy)
    assert by_torch.keys() == by_megatron.keys()
    assert all(torch.equal(by_megatron[name], weight) for name, weight in by_torch.items())
    assert any(".lora_B." in name and weight.any() for name, weight in by_megatron.items())


VLLM = os.environ.get("FOVEA_VLLM_PYTHON", ".venv-vllm/bin/python")
SGLANG = os.environ.get("FOVEA_SGLANG_PYTHON", ".venv-sglang/bin/python")
"""Interpreters of the environments of the engines, which want transformers 5."""
ON_VLLM = (
    "rollout.engine.name=vllm",
    f"rollout.engine.python={VLLM}",
    "rollout.engine.enforce_eager=true",
    "rollout.engine.kv_cache_gib=0.25",
)
ADAPTERS = ("model.lora.rank=4", "model.lora.exclude=[layers.1.mlp]", "rollout.engine.enable_lora=true")
PATIENCE = 400.0
"""Both libraries are imported, one after the other."""
CASES = {
    "adapters beside the weights, vLLM": (*ON_VLLM, *ADAPTERS),
    "all weights, SGLang": ("rollout.engine.name=sglang", f"rollout.engine.python={SGLANG}"),
}


SHORT = ("max_steps=3", "data.max_prompt_tokens=400", "evaluate.before_training=false")


def check_each_step(run_dir: Path, engine: str) -> None:
    """The parity gate, and log-probs of two later steps: the first weight sync brings all weights."""
    check_exact(run_dir, engine, steps=3)
    assert len({row["weights_checksum"] for row in read_metrics(run_dir)}) == 3


@pytest.mark.parametrize("case", CASES)
def test_the_engine_draws_with_the_weights_of_each_step(case: str, tmp_path: Path) -> None:
    settings = CASES[case]
    fovea(tmp_path, *settings, *SHORT, limit_seconds=PATIENCE)
    check_each_step(tmp_path, settings[0].rpartition("=")[2])


def test_servers_draw_with_the_weights_of_each_step(tmp_path: Path) -> None:
    """The server, and the run's client of it, are in the engine's environment; weights go through a folder."""
    model, weights, run_dir = tmp_path / "model", tmp_path / "weights", tmp_path / "run"
    save(tiny("qwen3_vl", num_layers=2, num_kv_heads=2), model)
    with serving(model, "--for-training", str(weights), python=VLLM) as server:
        server.wait_until_ready()
        engine = (
            "rollout.engine.name=vllm_servers",
            f"rollout.engine.servers=[{server.url}]",
            f"rollout.engine.weights_dir={weights}",
            f"rollout.engine.python={VLLM}",
        )
        its_model = (f"model.path={model}", "model.tiny=null")
        fovea(run_dir, *engine, *SHORT, *its_model, limit_seconds=PATIENCE)
    check_each_step(run_dir, "vllm_servers")


SMALL = (
    *("model.dtype=float32", "max_steps=2", "threads=1", "data.max_prompt_tokens=512", "algorithm.minibatches=2"),
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=6", "parity.prompts=1"),
    *("evaluate.before_training=false", "evaluate.image_controls=false", "evaluate.shared_images=ignore"),
    *("evaluate.test_size=2", "evaluate.dev_size=2", "log.tensorboard=false", HASH_REWARD),
)
ONE_READS = ("tests.train.megatron.one_reader", "train")
BASE = "geo3k_qwen2_5_vl_7b"
UNDIVIDED = ["train.backend.tensor_parallel_size=1", "train.backend.sequence_parallel=false"]
RECIPES = {"megatron_qwen2_5_vl": ("qwen2_5_vl", []), "megatron_qwen3_vl": ("qwen3_vl", UNDIVIDED)}
"""By recipe: the family of its model, and settings with which two processes hold the model once."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_takes_two_steps(recipe: str, tmp_path: Path) -> None:
    """The network of the embedded engine is read by the first process for both."""
    family, settings = RECIPES[recipe]
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
