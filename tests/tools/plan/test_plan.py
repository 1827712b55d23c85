"""`fovea plan` against what real networks have: their parameters, the tensors that autograd keeps, measured peaks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from socket import socket

import numpy as np
import pytest
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.vlm import VLM
from fovea_gym.errors import ConfigError
from fovea_tools.plan.activations import Numerics
from fovea_tools.plan.model_sizes import model_sizes
from fovea_tools.plan.plan import RunPlan, advice_for, changes_for, make_plan, with_settings
from fovea_tools.plan.rollout import decode_copies
from gym_tests.tables import table
from tests.policies import make_batch, make_policy
from tests.tiny_models import FAMILIES, image, renderer, save, tiny, user
from tests.tools.plan.published import (
    FEW_PROMPTS,
    QWEN2_5_VL_7B,
    QWEN3_VL_2B,
    QWEN3_VL_8B,
    RECIPES,
    folder_of,
    published,
    wide,
    with_words,
)
from tests.tools.plan.saved import GROUPS, TOKENS, config_for, measured_and_planned, peak_of_update

CHUNK = 64
TOLERANCE = 0.15


@pytest.mark.parametrize("how", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_activations_are_those_that_autograd_keeps(family: str, how: Recompute, tmp_path: Path) -> None:
    parts = tiny(family, **wide(family))
    recompute_activations(parts.network, how)
    vlm = VLM(parts.network.train(), parts.processor.banned_ids)
    prompts = [renderer(parts).prompt(user(image(seed, 64, 64), "How many circles?")) for seed in range(GROUPS)]
    tokens = TOKENS
    if family in ("qwen3_5", "qwen3_5_moe"):  # whole chunks of its delta rule
        filling = np.full(CHUNK - prompts[0].num_tokens, 5)
        prompts = [replace(each, token_ids_L=np.concatenate([each.token_ids_L, filling])) for each in prompts]
        tokens = CHUNK + 1
    folder = save(parts, tmp_path)
    measured, planned = measured_and_planned(vlm, prompts, folder, tokens, gradient_checkpointing=how)
    # the pixels are numpy's, and no activations
    measured -= sum(prompt.images[0].tensors["pixel_values"].nbytes for prompt in prompts)
    # checkpoints hold rotary positions as arguments, where autograd's hooks do not see them
    assert planned == pytest.approx(measured, rel=0.05 if how == "none" else TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_network(family: str, tmp_path: Path) -> None:
    parts = tiny(family)
    sizes = model_sizes(config_for(save(parts, tmp_path), 25, 9))
    assert sizes.parameters == sizes.trainable == sum(parameter.numel() for parameter in parts.network.parameters())
    assert sizes.tied


def test_published_models_have_their_published_sizes(tmp_path: Path) -> None:
    """Bytes of bfloat16 in the indices of Qwen/Qwen2.5-VL-7B-Instruct and Qwen/Qwen3-VL-8B-Instruct."""
    _, sizes = published(tmp_path / "7B")
    path = f"model.path={folder_of(tmp_path / '8B', QWEN3_VL_8B)}"
    larger = model_sizes(load_config([RECIPES / "geo3k.yaml"], [path]))
    assert [2 * each.parameters for each in (sizes, larger)] == [16_584_333_312, 17_534_247_392]
    assert (sizes.tied, larger.tied) == (False, False)


def test_states_of_a_sharded_policy_by_hand(tmp_path: Path) -> None:
    """On 8 ranks: float32 shards, moments and gradients, a shard of the reference, and an engine while it is awake."""
    config, sizes = published(tmp_path, "plan.gpu=a100-40")
    rollout, update = make_plan(config, sizes).phases
    count = sizes.parameters
    for phase in (rollout, update):
        for part, width in {"parameters": 4, "optimizer": 8, "reference model": 2}.items():
            assert phase.parts[part] == pytest.approx(width * count / 8, abs=8)
    assert rollout.parts["engine's weights"] == 2 * count
    assert "engine's weights" not in update.parts, "every sync brings all of them"
    assert update.parts["gradients"] == pytest.approx(4 * count / 8, rel=0.01)
    assert "gradients" not in rollout.parts, "an update frees them"
    # keys and values of 28 layers with 4 heads of 128 numbers, in 16 bits
    assert rollout.parts["key-value cache"] == 393_216 * 2 * 28 * 4 * 128 * 2


def test_a_sleeping_engine_keeps_what_is_frozen(tmp_path: Path) -> None:
    config, sizes = published(tmp_path, "model.lora.rank=16", "plan.gpu=a100-40")
    update = make_plan(config, sizes).phases[1].parts
    assert update["engine's weights"] == 2 * (sizes.parameters - sizes.trainable) == 16_584_333_312


def test_copies_of_weights_stay_with_the_cache_where_an_update_leaves_room_for_both(tmp_path: Path) -> None:
    config, sizes = published(tmp_path, "plan.gpu=h100")
    rollout, update = (phase.parts for phase in make_plan(config, sizes).phases)
    for part in ("engine's weights", "key-value cache"):
        assert update[part] == rollout[part]
    larger = with_settings(config, {"rollout.engine.max_batch_tokens": 600_000})
    assert not {"engine's weights", "key-value cache"} & make_plan(larger, sizes).phases[1].parts.keys()


def test_offload_and_replicas(tmp_path: Path) -> None:
    config, sizes = published(tmp_path)
    assert not make_plan(config, sizes).on_host
    plan = make_plan(with_settings(config, {"train.backend.cpu_offload": True}), sizes)
    count, widths = sizes.parameters, {"parameters": 4, "optimizer": 8, "gradients": 4}
    assert not widths.keys() & plan.phases[1].parts.keys()
    assert plan.on_host == {part: pytest.approx(width * count / 8, abs=8) for part, width in widths.items()}
    alone = make_plan(with_settings(config, {"train.backend.cpu_offload": True, "plan.gpus": 1}), sizes)
    assert 4 * count > 2**29
    assert alone.on_host == {"optimizer": 12 * count, "gradients": 2**29}, "master weights, two moments, two buckets"
    replicated = make_plan(with_settings(config, {"train.backend.replicas": 2}), sizes).phases[1].parts
    assert replicated["optimizer"] == pytest.approx(8 * sizes.parameters / 4, abs=8)
    assert replicated["gradients"] == pytest.approx(4 * sizes.parameters / 4, rel=0.01)


def test_no_seconds_of_a_network_between_nodes(tmp_path: Path) -> None:
    config, sizes = published(tmp_path)
    for nodes, link in ((1, 450), (2, None)):
        places = {"plan.gpus": None, "cluster.num_nodes": nodes, "cluster.gpus_per_node": 8 // nodes}
        plan = make_plan(with_settings(config, places), sizes)
        assert (plan.machine.gpus, plan.machine.link_gb_per_second, plan.link_seconds is None) == (8, link, nodes == 2)


HEAD = 152_064 * 3584
"""Numbers of Qwen2.5-VL-7B's head, which a critic lacks."""


def test_traffic_of_replicas_by_hand(tmp_path: Path) -> None:
    """2 replicas of 4 ranks: each row reduces 3 of 4 shards, and of 4 steps 2 * 1/2 shard goes to the other replica.

    Weights are gathered for old log-probs, for those of the reference, and for both passes of the update.
    """
    config, sizes = published(tmp_path)
    count, rows = sizes.parameters, make_plan(config, sizes).microbatches
    for replicas, past, over_replicas in ((1, 7 / 8, 0), (2, 3 / 4, 4 * 4 * count / 4)):
        found = make_plan(with_settings(config, {"train.backend.replicas": replicas}), sizes)
        assert found.received_bytes == pytest.approx(past * rows * (4 * 2 + 4) * count + over_replicas)
        assert found.link_seconds == pytest.approx(found.received_bytes / 450e9)
    with pytest.raises(ConfigError, match=r"\breplicas=3\b.*\b1, 2, 4 or 8\b"):
        make_plan(with_settings(config, {"train.backend.replicas": 3}), sizes)
    alone = make_plan(with_settings(config, {"plan.gpus": 1}), sizes)
    assert alone.received_bytes == alone.link_seconds == 0


def test_a_separate_critic_is_work_and_traffic(tmp_path: Path) -> None:
    """Its passes are the policy's, and one for values; a head gives values in the pass for old log-probs."""
    config, sizes = published(tmp_path, "algorithm.name=ppo", "algorithm.ppo_epochs=1", "algorithm.kl=null")
    rows, count = make_plan(config, sizes).microbatches, sizes.parameters
    for trunk, networks, trained in (("shared", 1, count), ("separate", 2, 2 * count - HEAD)):
        found = make_plan(with_settings(config, {"algorithm.advantage.critic.trunk": trunk}), sizes)
        logprobs, update = found.compute[1:]
        assert update.flops == networks * make_plan(config, sizes).compute[-1].flops
        assert logprobs.phase == "logprobs"
        assert found.received_bytes == pytest.approx(7 / 8 * rows * (3 * networks * 2 * count + 4 * trained))


@pytest.mark.parametrize(("width", "most_rows"), [(4, 64), (2, 256)], ids=["float32", "bfloat16"])
def test_decode_copies_on_a_cpu(width: int, most_rows: int, tmp_path: Path) -> None:
    _, sizes = published(tmp_path)
    numerics = Numerics(width=width, cuda=False)
    assert decode_copies(sizes, most_rows, numerics) == width * sizes.language_weights
    assert not decode_copies(sizes, most_rows + 1, numerics)
    assert not decode_copies(sizes, most_rows, Numerics(width=width, cuda=True))


def test_gpus_of_their_own_hold_one_side_only(tmp_path: Path) -> None:
    """Two of 8 GPUs generate: they hold an engine, and the other six hold shards of a sixth and no engine."""
    config, sizes = published(tmp_path, "cluster.placement=disaggregated", "cluster.rollout_gpus=2")
    rollout, update = make_plan(config, sizes).phases
    assert rollout.parts["engine's weights"] == 2 * sizes.parameters
    assert not {"optimizer", "gradients", "reference model"} & rollout.parts.keys()
    assert "engine's weights" not in update.parts
    assert update.parts["optimizer"] == pytest.approx(8 * sizes.parameters / 6, abs=8)


@pytest.mark.parametrize("logits_mib", [512.0, 0.005], ids=["whole", "in chunks"])
def test_peak_of_an_update_is_the_measured_one(logits_mib: float, tmp_path: Path) -> None:
    """Whole passes and optimizer steps of a tiny policy, by torch's allocator."""
    parts = tiny("qwen3_vl", **wide("qwen3_vl"))
    backend = {"logits_mib": logits_mib}
    batch = make_batch(parts)
    # what other tests have left is not this policy's: weights and moments are left out on both sides
    measured = peak_of_update(make_policy(parts, backend=backend), batch)
    groups, images = batch.groups, [one for group in batch.groups for one in group.prompt.images]
    lengths = {
        "prompt_tokens": sum(group.prompt.num_tokens for group in groups) // len(groups),
        "image_tokens": sum(one.num_tokens for one in images) // len(groups),
        "completion_tokens": round(sum(len(sample.token_ids_T) for sample in batch.samples) / 9),
    }
    rollout = {"prompts_per_step": len(groups), "samples_per_prompt": 3, "max_new_tokens": 9}
    sections = {"rollout": rollout | {"engine": {"reuse_gib": 0.0}}, "plan": lengths | {"gpu": "cpu", "gpus": 1}}
    model = {"path": str(save(parts, tmp_path))}
    config = Config.model_validate({"model": model, "train": {"backend": backend}, **sections})
    update = make_plan(config).phases[1]
    planned = update.total - update.parts["parameters"] - update.parts["optimizer"]
    assert update.parts["parameters"] == 4 * sum(parameter.numel() for parameter in parts.network.parameters())
    assert update.parts["optimizer"] == 2 * update.parts["parameters"]
    assert planned == pytest.approx(measured, rel=TOLERANCE)


KV_BYTES = 2 * 28 * 8 * 128 * 2
"""Keys and values of a token of Qwen3-VL-2B in bfloat16: 28 layers of 8 heads of width 128."""


def geo3k_plan(tmp_path: Path, *words: str) -> RunPlan:
    """The plan of recipes/geo3k.yaml on one H100 of 80 GB."""
    path = f"model.path={folder_of(tmp_path, QWEN3_VL_2B)}"
    return make_plan(load_config([RECIPES / "geo3k.yaml"], [path, "plan.gpus=1", "plan.gpu=h100", *words]))


def test_a_pool_stays_where_it_fits_beside_the_update(tmp_path: Path) -> None:
    rollout, update = geo3k_plan(tmp_path).phases
    assert rollout.parts["key-value cache"] == update.parts["key-value cache"] == 131_072 * KV_BYTES
    rollout, update = geo3k_plan(tmp_path, "rollout.engine.max_batch_tokens=300000").phases
    assert rollout.parts["key-value cache"] == 300_000 * KV_BYTES
    assert "key-value cache" not in update.parts, "freed, and allocated again"


def test_a_pool_without_a_size_is_what_memory_leaves(tmp_path: Path) -> None:
    default = "rollout.engine.max_batch_tokens=null"
    plan = geo3k_plan(tmp_path, default)
    assert plan.batch_tokens is not None
    assert plan.peak.phase == "update"
    assert 0 <= plan.machine.usable_bytes - plan.peak.total < KV_BYTES, "all memory that the update leaves free"
    plan = geo3k_plan(tmp_path, default, "train.gradient_checkpointing=none", "train.max_tokens_per_microbatch=24576")
    rollout, update = plan.phases
    held = rollout.parts["parameters"] + rollout.parts["optimizer"]
    assert plan.batch_tokens == int(0.8 * (plan.machine.usable_bytes - held)) // KV_BYTES, "four fifths of what is free"
    assert "key-value cache" not in update.parts


def test_advice_is_what_fits(tmp_path: Path) -> None:
    path = f"model.path={folder_of(tmp_path, QWEN3_VL_2B)}"
    small = ["plan.gpus=1", "plan.gpu=a100-40", "rollout.engine.max_batch_tokens=65536", "rollout.max_new_tokens=1024"]
    small += ["data.max_prompt_tokens=1024", "model.freeze_vision_tower=true", "train.gradient_checkpointing=none"]
    config = load_config([RECIPES / "geo3k.yaml"], [path, *small, FEW_PROMPTS])
    sizes = model_sizes(config)
    assert not make_plan(config, sizes).fits
    changes = [with_words(config, each.settings) for each in advice_for(config)]
    assert changes
    assert all(make_plan(changed, sizes if changed.model == config.model else None).fits for changed in changes)


def test_advice_is_what_runs(tmp_path: Path) -> None:
    """An engine refuses a prompt that does not fit its cache with all completions, and LoRA trains no projector."""
    words = ["plan.gpus=1", "rollout.max_new_tokens=4096", "model.freeze_projector=false"]
    config, sizes = published(tmp_path, FEW_PROMPTS, *words)
    assert not make_plan(config, sizes).fits
    tried = [settings for change in changes_for(config, make_plan(config, sizes)) for settings in change]
    cache = "rollout.engine.max_batch_tokens"
    assert min(settings[cache] for settings in tried if cache in settings) >= 1024 + 5 * 4096
    assert {"train.backend.cpu_offload", "model.lora.rank"} <= {key for settings in tried for key in settings}
    assert all("lora" not in word for each in advice_for(config) for word in each.settings)


def test_engines_move_to_gpus_of_their_own_where_both_do_not_fit_one(tmp_path: Path) -> None:
    """A 7B model's engine and the weights that FSDP2 gathers beside it are more than a GPU of 24 GiB has."""
    small = ["rollout.prompts_per_step=64", "rollout.engine.max_batch_tokens=32768", "model.feature_cache_gib=0"]
    config, sizes = published(tmp_path, "plan.gpu=l4", "plan.gpus=8", "model.lora.rank=16", *small)
    assert not make_plan(config, sizes).fits
    assert ("cluster.placement=disaggregated", "cluster.rollout_gpus=4") in [x.settings for x in advice_for(config)]


@table(
    ("words", "exit_code", "verdict"),
    [
        (["plan.gpus=1"], 1, "does not fit.*it fits with"),
        (
            ["rollout.engine.max_batch_tokens=null"],
            0,
            r"at once on average\); sized to all memory that the update leaves free, so it can stay allocated seconds"
            r".*fits: 2\d\.\d\d GiB are free at the peak, in the update, and the key-value cache takes them",
        ),
        (
            ["rollout.engine.max_batch_tokens=65536"],
            0,
            r"at once on average\); sized to rollout\.engine\.max_batch_tokens seconds.*free at the peak, in the \w+$",
        ),
    ],
)
def test_the_command_says_what_to_change_and_what_the_cache_was_sized_to(
    words: list[str], exit_code: int, verdict: str, tmp_path: Path
) -> None:
    path = f"model.path={folder_of(tmp_path, QWEN2_5_VL_7B)}"
    done = CliRunner().invoke(app, ["plan", str(RECIPES / "geo3k_qwen2_5_vl_7b.yaml"), path, FEW_PROMPTS, *words])
    assert done.exit_code == exit_code, done.output
    assert re.search(verdict, " ".join(done.stdout.split())), done.stdout[-300:]


def test_the_command_prints_a_plan_as_json(tmp_path: Path) -> None:
    path = f"model.path={folder_of(tmp_path, QWEN2_5_VL_7B)}"
    done = CliRunner().invoke(app, ["plan", str(RECIPES / "geo3k_qwen2_5_vl_7b.yaml"), path, FEW_PROMPTS, "--json"])
    assert (done.exit_code, json.loads(done.stdout)["fits"]) == (0, True)


@table(
    ("model", "message"),
    [
        ("{folder}", "config.json; add this file, the only one that `fovea plan` reads"),
        # without a question to the hub, which knows no such name
        ("{folder}/Qwen3-Vl", "no such folder; did you mean {folder}/Qwen3-VL?"),
        ("nobody/has-this-model", "set model.path to a folder with this file, the only one that `fovea plan` reads"),
    ],
)
def test_a_model_without_a_config_is_one_line(model: str, message: str, tmp_path: Path) -> None:
    folder_of(tmp_path / "Qwen3-VL", QWEN3_VL_2B)
    words = ["plan", str(RECIPES / "geo3k.yaml"), f"model.path={model.format(folder=tmp_path)}"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert message.format(folder=tmp_path) in done.stderr.replace("\n", "")


def test_without_a_network_a_hub_id_is_one_line_after_one_try(tmp_path: Path) -> None:
    with socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens there
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        variables = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        words = ["plan", str(RECIPES / "geo3k.yaml"), "model.path=nobody/has-this-model"]
        command, env = [sys.executable, "-m", "fovea", *words], os.environ | variables
        done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "not in the local cache, and no connection to the hub (" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
