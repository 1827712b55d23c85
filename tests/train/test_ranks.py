"""A policy on two real processes, weights sharded: the losses, norms, decisions and files of one process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fovea.advantages import with_advantages
from fovea.build.model import make_vlm
from fovea.build.policy import make_policy
from fovea.config.run import Config
from fovea.errors import TrainError
from fovea.models.tiny import TinyParts
from fovea.samples import replace_samples
from fovea.train.base import Needs, Pair
from fovea.train.torch.policy import TorchPolicy
from fovea.train.torch.ranks import ALONE, Ranks
from fovea.train.torch.sharding import full
from fovea.types import Batch
from tests.policies import make_batch, many_groups
from tests.tiny_models import tiny

STEPS = 5
PATIENCE = timedelta(seconds=120)
MAX_TOKENS = 75
"""Of a micro-batch: some groups do not fit together."""
GRPO = {"entropy_coef": 0.01, "kl": {"coef": 0.05}, "ppo_epochs": 2}
PPO = {"name": "ppo", "ppo_epochs": 2, "minibatches": 2}
SEPARATE = {**PPO, "advantage": {"critic": {"trunk": "separate"}}}
UNFROZEN = {"freeze_vision_tower": False}
WARMUP = {"max_steps": 4, "learning_rate": 1e-3}
Found = dict[str, Any]
"""What a rank has seen, of what JSON can hold."""


def policy_of(
    ranks: Ranks,
    algorithm: dict[str, object],
    *,
    model: dict[str, object] = UNFROZEN,
    train: dict[str, object] = {},  # noqa: B006 (never written to)
    **settings: object,
) -> TorchPolicy:
    config = Config.model_validate(
        {
            "model": {"tiny": {"family": "qwen3_vl"}, "device": "cpu", **model},
            "algorithm": algorithm,
            "train": {"learning_rate": 1e-3, "lr_warmup_steps": 0, "max_tokens_per_microbatch": MAX_TOKENS, **train},
            "max_steps": 10,
            **settings,
        }
    )
    parts = tiny("qwen3_vl")
    network = parts.network.to(getattr(torch, config.model.dtype))
    return make_policy(config, make_vlm(config, network, parts.processor.banned_ids), ranks=ranks)


@cache
def batch_of(seed: int) -> Batch:
    """Five groups with images and without, of different lengths and rewards."""
    parts, rng = _rendering_model(), np.random.default_rng(seed)
    groups = (*make_batch(parts, seed).groups, *make_batch(parts, seed + 100).groups[1:])
    batch = Batch(
        groups=tuple(replace(group, task_id=f"row {index}") for index, group in enumerate(groups)),
        left_out=make_batch(parts, seed + 200).groups[:1],
    )
    return replace_samples(batch, lambda sample: replace(sample, reward=float(rng.normal())))


@cache
def _rendering_model() -> TinyParts:
    return tiny("qwen3_vl")


def two_groups() -> Batch:
    """One with an image, one without: a rank has text only."""
    groups = batch_of(0).groups
    return Batch(groups=(groups[0], groups[2]))


def step(policy: TorchPolicy, batch: Batch, kl_coef: float = 0.05) -> dict[str, float]:
    algorithm = policy._algorithm
    batch = policy.annotate(batch, Needs.of(algorithm))
    batch, _ = with_advantages(batch, algorithm, kl_coef)
    return policy.update(batch)


def with_nan(batch: Batch, group: int) -> Batch:
    groups = list(batch.groups)
    samples = [replace(s, advantages_T=np.full(len(s.token_ids_T), np.nan, np.float32)) for s in groups[group].samples]
    groups[group] = replace(groups[group], samples=tuple(samples))
    return replace(batch, groups=tuple(groups))


def checksum(policy: TorchPolicy) -> float:
    return float(sum(weight.double().abs().sum() for _, weight in policy.weights()))


def grpo(ranks: Ranks, folder: Path) -> Found:
    """With a trained vision tower, a reference and entropy; the second epoch is off-policy."""
    policy = policy_of(ranks, GRPO)
    micros = policy._scorer.micro_batches(batch_of(0).groups)
    metrics = [step(policy, batch_of(seed)) for seed in range(STEPS)]
    return {"metrics": metrics, "weights": checksum(policy), "workers": policy.describe().num_workers} | {
        "samples": [micro.sample_numbers for micro in micros],
        "images": [len(micro.row.images) for micro in micros],
    }


def text_on_one(ranks: Ranks, folder: Path) -> Found:
    policy = policy_of(ranks, {})
    micros = policy._scorer.micro_batches(two_groups().groups)
    metrics = [step(policy, two_groups()) for _ in range(2)]
    return {"metrics": metrics, "weights": checksum(policy)} | {
        "samples": [micro.sample_numbers for micro in micros],
        "images": [[image.key for image in micro.row.images] for micro in micros],
    }


def one_group(ranks: Ranks, folder: Path) -> Found:
    """A rank has nothing but fillers."""
    policy = policy_of(ranks, GRPO)
    batch = replace(batch_of(0), groups=batch_of(0).groups[:1])
    return {"metrics": [step(policy, batch) for _ in range(2)], "weights": checksum(policy)}


def ppo_shared(ranks: Ranks, folder: Path) -> Found:
    policy = policy_of(ranks, PPO)
    return {"metrics": [step(policy, batch_of(seed)) for seed in range(2)], "weights": checksum(policy)}


def ppo_separate(ranks: Ranks, folder: Path) -> Found:
    policy = policy_of(ranks, SEPARATE)
    return {"metrics": [step(policy, batch_of(seed)) for seed in range(2)], "weights": checksum(policy)}


def frozen_tower(ranks: Ranks, folder: Path) -> Found:
    """Whole on every rank, its features cached; gradient checkpointing of the decoder."""
    policy = policy_of(ranks, GRPO, model={"freeze_vision_tower": True}, train={"gradient_checkpointing": True})
    return {"metrics": [step(policy, batch_of(seed)) for seed in range(1)], "weights": checksum(policy)}


def lora(ranks: Ranks, folder: Path) -> Found:
    """Adapters on sharded weights that are frozen; the reference is the model without them."""
    policy = policy_of(ranks, GRPO, model={"lora": {"rank": 4}})
    return {"metrics": [step(policy, batch_of(seed)) for seed in range(2)], "weights": checksum(policy)}


def fixed_length(ranks: Ranks, folder: Path) -> Found:
    """Rows padded to one length, fillers too."""
    fixed = {"variable_seq_lengths": False, "enable_dynamic_batch_size": False, "groups_per_microbatch": 1}
    policy = policy_of(ranks, {}, train={**fixed, "max_tokens_per_microbatch": 150})
    return {"metrics": [step(policy, batch_of(0))], "weights": checksum(policy)}


def not_finite(ranks: Ranks, folder: Path) -> Found:
    """One rank has the bad group; the update after that goes on."""
    policy = policy_of(ranks, {"ppo_epochs": 2}, train={"max_skipped_updates": 1})
    before = checksum(policy)
    bad = with_nan(batch_of(0), 3)
    metrics = [policy.update(bad)]
    moved = checksum(policy) != before
    metrics += [step(policy, batch_of(0)), policy.update(bad)]
    try:
        policy.update(bad)
    except TrainError as error:
        return {"metrics": metrics, "moved": moved, "error": str(error), "weights": checksum(policy)}
    raise AssertionError("two skipped updates in a row, and no error")


def kl_limit(ranks: Ranks, folder: Path) -> Found:
    policy = policy_of(ranks, {"ppo_epochs": 4, "max_policy_kl": 1e-5}, train={"learning_rate": 1e-3})
    return {"metrics": [step(policy, batch_of(seed)) for seed in range(1)], "weights": checksum(policy)}


def supervised(ranks: Ranks, folder: Path) -> Found:
    """The warm-up, after which a KL pulls towards its weights."""
    policy = policy_of(ranks, GRPO, warmup=WARMUP)
    prompts = [group.prompt for group in batch_of(0).groups]
    pairs = [Pair(prompt=prompt, answer_ids=(5, 6, 7)[: 1 + n % 3]) for n, prompt in enumerate(prompts)]
    losses = [policy.sft(pairs[:3])["loss"], policy.sft(pairs)["loss"], policy.sft(pairs[:1])["loss"]]
    policy.snapshot_reference()
    return {"losses": losses, "metrics": [step(policy, batch_of(1))], "weights": checksum(policy)}


def saved(ranks: Ranks, folder: Path) -> Found:
    """Two steps, saved, and two more."""
    policy = policy_of(ranks, GRPO, warmup=WARMUP)
    policy.snapshot_reference()
    for seed in range(2):
        step(policy, batch_of(seed))
    policy.save(folder)
    return {"metrics": [step(policy, batch_of(seed)) for seed in range(2, 4)], "weights": checksum(policy)}


def loaded(ranks: Ranks, folder: Path) -> Found:
    policy = policy_of(ranks, GRPO, warmup=WARMUP)
    policy.load(folder)
    return {"metrics": [step(policy, batch_of(seed)) for seed in range(2, 4)], "weights": checksum(policy)}


def bfloat16(ranks: Ranks, folder: Path) -> Found:
    """Relative distance of the gradient of 18 micro-batches from that of one process, whose sum is float32."""
    batch, found = many_groups(18), []
    for own in (ranks, ALONE):
        one_by_one = {"enable_dynamic_batch_size": False, "groups_per_microbatch": 1}
        policy = policy_of(own, {}, model={**UNFROZEN, "dtype": "bfloat16"}, train=one_by_one)
        assert policy._vlm.dtype == torch.bfloat16
        policy._backward(batch.groups, None, scale=1.0)
        gradients = [full(x.grad) for x in policy._optimizer.parameters.values() if x.grad is not None]
        found.append(torch.cat([x.flatten().float() for x in gradients]))
    sharded, alone = found
    return {"distance": float((sharded - alone).norm() / alone.norm())}


Scenario = Callable[[Ranks, Path], Found]
SCENARIOS: Sequence[Scenario] = (
    grpo,
    text_on_one,
    one_group,
    ppo_shared,
    ppo_separate,
    frozen_tower,
    lora,
    fixed_length,
    not_finite,
    kl_limit,
    supervised,
)


def process(rank: int, port: int, folder: Path) -> None:
    """One of two, through all scenarios."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    ranks = Ranks.of_process_group("cpu")
    found = {scenario.__name__: scenario(ranks, folder) for scenario in SCENARIOS}
    found["bfloat16"] = bfloat16(ranks, folder)
    found["saved"] = saved(ranks, folder / "by two")
    found["loaded"] = loaded(ranks, folder / "by one")
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("by one", "by two"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def saved_by_one(folder: Path) -> Found:
    return saved(ALONE, folder / "by one")


@pytest.fixture(scope="module")
def both(folder: Path, saved_by_one: Found) -> list[dict[str, Found]]:
    """What each of two processes found, which are started once for all scenarios."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    torch.multiprocessing.spawn(process, (store.port, folder), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


LOCAL = {"memory/activations_gib"}
"""The largest of a rank's rows; all else is of the whole batch."""


def assert_as_one_process(found: Sequence[Found], alone: Found) -> None:
    assert found[0]["metrics"] == found[1]["metrics"], "the ranks disagree"
    for ours, expected in zip(found[0]["metrics"], alone["metrics"], strict=True):
        assert ours.keys() == expected.keys()
        for name in ours.keys() - LOCAL:
            assert ours[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
        assert ours.get("grad_norm", 0.0) == pytest.approx(expected.get("grad_norm", 0.0), rel=1e-5)
    for of_rank in found:
        assert of_rank["weights"] == pytest.approx(alone["weights"], rel=1e-7)
        assert of_rank.get("losses", []) == pytest.approx(alone.get("losses", []), rel=1e-5)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_train_as_one_process(scenario: Scenario, both: list[dict[str, Found]], folder: Path) -> None:
    assert_as_one_process([found[scenario.__name__] for found in both], scenario(ALONE, folder))


def test_the_ranks_share_the_samples_and_begin_with_uneven_rows(both: list[dict[str, Found]]) -> None:
    """Every sample once; the rank with fewer rows has one without samples, and no row is without an image."""
    rows = [found["grpo"]["samples"] for found in both]
    assert sorted(number for of_rank in rows for row in of_rank for number in row) == list(range(15))
    assert len(rows[0]) == len(rows[1])
    assert len({sum(map(bool, of_rank)) for of_rank in rows}) == 2, "as many rows of their own: nothing was padded"
    assert all(images > 0 for found in both for images in found["grpo"]["images"])


def test_a_rank_with_text_only_looks_at_an_image_of_the_other(both: list[dict[str, Found]]) -> None:
    images = [found["text_on_one"]["images"] for found in both]
    assert images[0] == images[1] == [[image.key for image in two_groups().groups[0].prompt.images]]
    assert [len(found["text_on_one"]["samples"][0]) for found in both] == [3, 3], "both have a group"


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_both(both: list[dict[str, Found]]) -> None:
    for found in both:
        skipped, good, again = found["not_finite"]["metrics"]
        assert (skipped["updates_skipped"], good["updates_skipped"], again["updates_skipped"]) == (1, 0, 1)
        assert not found["not_finite"]["moved"]
        assert "with the samples of row 3;" in found["not_finite"]["error"]


def test_a_limit_on_the_kl_ends_the_passes_on_both(both: list[dict[str, Found]]) -> None:
    for found in both:
        first = found["kl_limit"]["metrics"][0]
        assert 1 <= first["epochs_run"] < 4
        assert first["kl/policy"] > 1e-5


def test_bfloat16_gradients_are_rounded_once_over_all_micro_batches(both: list[dict[str, Found]]) -> None:
    """By FSDP2, to the type of the weights: half a unit in the last of 8 bits at most."""
    assert all(found["bfloat16"]["distance"] < 2**-9 for found in both)


def test_saved_on_two_loaded_on_one_and_the_reverse(
    both: list[dict[str, Found]], saved_by_one: Found, folder: Path
) -> None:
    """Optimizer and reference included; the same files."""
    assert_as_one_process([found["saved"] for found in both], loaded(ALONE, folder / "by two"))
    assert_as_one_process([found["loaded"] for found in both], saved_by_one)
    names = [sorted(path.name for path in (folder / name).iterdir()) for name in ("by one", "by two")]
    assert names[0] == names[1]
