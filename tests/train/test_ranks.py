"""A policy on two real processes, weights sharded: the losses, norms, decisions and files of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks.torch_memory import live_bytes_with_gradients
from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm
from fovea.errors import TrainError
from fovea.train.base import SftExample
from fovea.train.ranks import ALONE, Ranks
from fovea.train.torch.checkpoint import SavedShards, StagedShards
from fovea.train.torch.policy import TorchPolicy
from fovea.train.torch.sharding import full
from fovea.types import Batch
from tests.policies import NO_CLIPPING, many_groups, packed_rows, update_gradients, weights_of, with_advantage
from tests.process_ranks import found_by_ranks
from tests.saved import saved_tensors
from tests.train.rank_policies import (
    GRPO,
    MAX_TOKENS,
    PPO,
    SEPARATE,
    STEPS,
    UNFROZEN,
    WARMUP,
    Driver,
    Found,
    assert_as_one_process,
    batch_of,
    checksum,
    policy_of,
    step,
    three_groups,
    two_groups,
)

EXPERTS, LORA = {"family": "qwen3_vl_moe"}, {"model": {"lora": {"rank": 4}}}
RECOMPUTED = {"gradient_checkpointing": "full"}
SETTINGS: dict[str, tuple[dict[str, object], dict[str, Any], int]] = {
    "experts": (GRPO, EXPERTS, 2),
    # a separate value model
    "experts of ppo": (SEPARATE, {**EXPERTS, "model": {**UNFROZEN, "freeze_router": True}}, 1),
    # adapters on attention; experts are frozen, recomputed in the backward pass, and send gradients through
    "experts with lora": (GRPO, {**EXPERTS, **LORA, "train": RECOMPUTED}, 1),
    # layers of two kinds, whose decay and convolution are sharded with them
    "delta nets": (GRPO, {"family": "qwen3_5", "train": RECOMPUTED}, 1),
    "ppo, shared": (PPO, {}, 2),
    "ppo, separate": (SEPARATE, {}, 2),
    # whole on every rank, its features cached; gradient checkpointing of the decoder
    "frozen tower": (GRPO, {"model": {"freeze_vision_tower": True}, "train": RECOMPUTED}, 1),
    # adapters on sharded weights that are frozen; the reference is the model without them
    "lora": (GRPO, LORA, 2),
    # micro-batches of one group each, fillers too
    "by count": ({}, {"train": {"enable_dynamic_batch_size": False, "groups_per_microbatch": 1}}, 1),
    "kl limit": ({"ppo_epochs": 4, "max_policy_kl": 1e-5}, {"train": {"learning_rate": 1e-3}}, 1),
}
"""Algorithm, other settings, and steps that are taken."""


def taken(policy: TorchPolicy, batches: Iterable[Batch]) -> Found:
    return {"metrics": [step(policy, batch) for batch in batches], "weights": checksum(policy)}


def by_settings(name: str, ranks: Ranks) -> Found:
    algorithm, settings, steps = SETTINGS[name]
    return taken(policy_of(ranks, algorithm, **settings), map(batch_of, range(steps)))


def grpo(ranks: Ranks) -> Found:
    """With a trained vision tower, a reference and entropy, logits in chunks; the second epoch is off-policy."""
    policy = policy_of(ranks, GRPO, train={"backend": {"logits_mib": 0.005}})
    with packed_rows() as packed:
        metrics = [step(policy, batch_of(0))]
    micros = packed[-1]
    metrics += [step(policy, batch_of(seed)) for seed in range(1, STEPS)]
    return {"metrics": metrics, "weights": checksum(policy), "workers": policy.describe().num_workers} | {
        "samples": [micro.sample_numbers for micro in micros],
        "images": [len(micro.row.images) for micro in micros],
    }


def text_on_one(ranks: Ranks) -> Found:
    policy = policy_of(ranks, {})
    with packed_rows() as packed:
        metrics = [step(policy, two_groups()) for _ in range(2)]
    return {"metrics": metrics, "weights": checksum(policy)} | {
        "samples": [micro.sample_numbers for micro in packed[-1]],
        "images": [[image.key for image in micro.row.images] for micro in packed[-1]],
    }


def one_group(ranks: Ranks) -> Found:
    """A rank has nothing but fillers; learning rates are apart."""
    rates = {"vision_tower_learning_rate": 3e-4, "projector_learning_rate": 7e-4}
    policy = policy_of(ranks, GRPO, train=rates)
    batch = replace(batch_of(0), groups=batch_of(0).groups[:1])
    return taken(policy, [batch] * 2)


def two_replicas(ranks: Ranks) -> Found:
    """Whole weights on either rank: gradients of several micro-batches are summed over both after the last one."""
    replicated = ranks if ranks.size == 1 else Ranks.of_process_group("cpu", replicas=2)
    policy = policy_of(replicated, SEPARATE)
    return taken(policy, map(batch_of, range(2)))


def lora_of_vision(ranks: Ranks) -> Found:
    """A batch of text has no gradient; in a batch with images every rank encodes one in each row."""
    policy = policy_of(ranks, {}, model={"lora": {"rank": 4, "parts": ["vision_tower"]}}, warmup=WARMUP)
    of_text = Batch(groups=tuple(batch_of(seed).groups[2] for seed in range(3)))
    assert not any(group.images for group in of_text.groups)
    driver = Driver(policy)
    pairs = [SftExample(prompt=group.prompt, answer_ids=(5, 6)) for group in of_text.groups]
    before = checksum(policy)
    losses = [driver.sft(pairs)["loss"]]
    policy.snapshot_reference()
    metrics = [step(policy, of_text)]
    assert checksum(policy) == before
    metrics += [step(policy, batch) for batch in (batch_of(0), of_text, batch_of(1))]
    return {"losses": losses, "metrics": metrics, "weights": checksum(policy)}


def not_finite(ranks: Ranks) -> Found:
    """One rank has the bad group; the update after that goes on."""
    policy = policy_of(ranks, {"ppo_epochs": 2}, train={"max_skipped_updates": 1})
    before = checksum(policy)
    bad = with_advantage(batch_of(0), 3, np.nan)
    metrics = [Driver(policy).update(bad)]
    moved = checksum(policy) != before
    metrics += [step(policy, batch_of(0)), Driver(policy).update(bad)]
    with pytest.raises(TrainError) as raised:
        Driver(policy).update(bad)
    return {"metrics": metrics, "moved": moved, "error": str(raised.value), "weights": checksum(policy)}


def bad_gradient(ranks: Ranks) -> Found:
    """The loss is finite, and a gradient overflows on its way back through any image that has one."""
    policy = policy_of(ranks, {}, train={"max_skipped_updates": 0})

    def overflow(_: object, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        largest = torch.finfo(torch.float32).max
        return tuple(g * largest * largest for g in gradients)

    policy.vlm.network.get_submodule("model.visual.merger").register_full_backward_pre_hook(overflow)
    with pytest.raises(TrainError) as raised:
        Driver(policy).update(batch_of(0))
    return {"error": str(raised.value)}


def image_bytes(ranks: Ranks) -> Found:
    """Bytes of images that a rank is sent for log-probs and update, in one minibatch and in several."""
    found: Found = {}
    for name, algorithm in {"grpo": GRPO, "ppo": PPO}.items():
        # no group is split, as its images would go to several ranks
        train = {"max_tokens_per_microbatch": 500}
        driver = Driver(policy_of(ranks, algorithm, model={"freeze_vision_tower": True}, train=train))
        batch, _ = with_advantages(driver.compute_logprobs(three_groups()), Algorithm.model_validate(algorithm), 0.05)
        scored = driver.here.image_bytes
        driver.update(batch)
        found[name] = [scored, driver.here.image_bytes]
    return found


def lowered(ranks: Ranks) -> Found:
    """As a run goes on after its memory ran out: micro-batches are smaller than those of the settings."""
    policy = policy_of(ranks, GRPO, train={"max_tokens_per_microbatch": 500})
    policy.limit_microbatches(MAX_TOKENS)  # splits a group, so that both ranks need its images
    return taken(policy, [three_groups()])


def supervised(ranks: Ranks) -> Found:
    """The warm-up, after which a KL pulls towards its weights."""
    policy = policy_of(ranks, GRPO, warmup=WARMUP)
    prompts = [group.prompt for group in batch_of(0).groups]
    pairs = [SftExample(prompt=prompt, answer_ids=(5, 6, 7)[: 1 + n % 3]) for n, prompt in enumerate(prompts)]
    driver = Driver(policy)
    losses = [driver.sft(pairs[:3])["loss"], driver.sft(pairs)["loss"], driver.sft(pairs[:1])["loss"]]
    policy.snapshot_reference()
    return {"losses": losses, **taken(policy, [batch_of(1)])}


SAVED: dict[str, Callable[[Ranks], TorchPolicy]] = {
    "grpo": lambda ranks: policy_of(ranks, GRPO, warmup=WARMUP),
    "lora": lambda ranks: policy_of(ranks, GRPO, **LORA),
    "ppo": lambda ranks: policy_of(ranks, SEPARATE),
}
"""Policies by what their checkpoints hold: a reference that a warm-up made, adapters alone, a critic's own model."""


def saved(ranks: Ranks, folder: Path, kind: str) -> Found:
    """A step, saved, and two more while the files are written."""
    policy = SAVED[kind](ranks)
    policy.snapshot_reference()
    step(policy, batch_of(0))
    policy.save(folder / kind)
    metrics = [step(policy, batch_of(seed)) for seed in range(1, 3)]
    policy.finish_save()
    return {"metrics": metrics, "weights": checksum(policy)}


def loaded(ranks: Ranks, folder: Path, kind: str) -> Found:
    policy = SAVED[kind](ranks)
    policy.load(folder / kind)
    return taken(policy, map(batch_of, range(1, 3)))


def replicas(ranks: Ranks, folder: Path) -> Found:
    """Two copies of a tensor, saved by a mesh of two by one and read by one of shards."""
    whole = torch.arange(12.0).reshape(6, 2)
    mesh = init_device_mesh("cpu", (2, 1))
    StagedShards.of({"x": distribute_tensor(whole, mesh, [Replicate(), Shard(0)])}, ranks).write(folder, ranks.rank)
    dist.barrier()
    sharded = distribute_tensor(torch.zeros(6, 2), ranks.mesh, [Shard(0)])
    SavedShards(folder).copy_into({"x": sharded})
    return {"read": torch.equal(full(sharded), whole)}


def bfloat16(ranks: Ranks) -> Found:
    """Relative distance of each gradient of 12 micro-batches from that of one process, and their types."""
    batch, found, types = many_groups(12), [], []
    for own in (ranks, ALONE):
        one_by_one = {"enable_dynamic_batch_size": False, "groups_per_microbatch": 1, "max_grad_norm": NO_CLIPPING}
        policy = policy_of(own, {}, model={**UNFROZEN, "dtype": "bfloat16"}, train=one_by_one)
        assert policy.dtype == torch.bfloat16
        assert {full(weight, policy.dtype).dtype for weight in weights_of(policy).values()} == {torch.bfloat16}
        grads = update_gradients(policy, batch)
        types += [str(x.dtype) for x in grads.values()]
        found.append({name: full(x).float() for name, x in grads.items()})
    sharded, alone = found
    distances = {name: float((sharded[name] - x).norm() / x.norm()) for name, x in alone.items()}
    return {"distances": distances, "types": sorted(set(types))}


def between_micro_batches(ranks: Ranks) -> Found:
    """Most bytes of tensors before the second and later micro-batches beyond those before the first, and of gradients.

    Shards of gradients, which the optimizer sees, are not counted.
    """
    one_by_one = {"enable_dynamic_batch_size": False, "groups_per_microbatch": 1}
    policy = policy_of(ranks, {}, train=one_by_one)
    live: list[int] = []
    policy.update(many_groups(10))
    policy.vlm.register_forward_pre_hook(lambda _module, _inputs: live.append(live_bytes_with_gradients()))
    held = sum(gradient.to_local().nbytes for gradient in update_gradients(policy, many_groups(10)).values())
    whole = sum(weight.numel() * 4 for weight in policy.vlm.parameters())
    return {"micro_batches": len(live), "extra": max(live[1:]) - live[0] - held, "shards": held, "whole": whole}


Scenario = Callable[[Ranks], Found]
Both = list[dict[str, Found]]
BY_HAND = (grpo, text_on_one, one_group, two_replicas, lora_of_vision, not_finite, supervised)
SCENARIOS: dict[str, Scenario] = {each.__name__: each for each in BY_HAND} | {
    name: partial(by_settings, name) for name in SETTINGS
}


def process(rank: int, folder: Path) -> dict[str, Found]:
    """One of two, through all scenarios."""
    ranks = Ranks.of_process_group("cpu")
    others = (bfloat16, between_micro_batches, bad_gradient, lowered, image_bytes)
    found: dict[str, Found] = {name: scenario(ranks) for name, scenario in SCENARIOS.items()}
    found |= {other.__name__: other(ranks) for other in others}
    found["saved"] = {kind: saved(ranks, folder / "by two", kind) for kind in SAVED}
    dist.barrier()
    found["loaded"] = {kind: loaded(ranks, folder / "by one", kind) for kind in SAVED}
    return found | {"replicas": replicas(ranks, folder / "replicas")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("by one", "by two"):
        for kind in SAVED:
            (folder / name / kind).mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def saved_by_one(folder: Path) -> Found:
    return {kind: saved(ALONE, folder / "by one", kind) for kind in SAVED}


@pytest.fixture(scope="module")
def both(folder: Path, saved_by_one: Found) -> Both:
    """What each of two processes found, which are started once for all scenarios."""
    return found_by_ranks(process, folder, folder=folder)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_train_as_one_process(name: str, both: Both) -> None:
    assert_as_one_process([found[name] for found in both], SCENARIOS[name](ALONE))


def test_the_ranks_share_the_samples_and_begin_with_uneven_rows(both: Both) -> None:
    """Every sample once; the rank with fewer rows has one without samples, and no row is without an image."""
    rows = [found["grpo"]["samples"] for found in both]
    assert sorted(number for of_rank in rows for row in of_rank for number in row) == list(range(15))
    assert len(rows[0]) == len(rows[1])
    assert len({sum(map(bool, of_rank)) for of_rank in rows}) == 2, "as many their own rows: nothing was padded"
    assert all(images > 0 for found in both for images in found["grpo"]["images"])


def test_a_rank_with_text_only_looks_at_an_image_of_the_other(both: Both) -> None:
    images = [found["text_on_one"]["images"] for found in both]
    assert images[0] == images[1] == [[image.key for image in two_groups().groups[0].prompt.images]]
    assert [len(found["text_on_one"]["samples"][0]) for found in both] == [3, 3], "both have a group"


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_both(both: Both) -> None:
    for found in both:
        assert [metrics["updates_skipped"] for metrics in found["not_finite"]["metrics"]] == [1, 0, 1]
        assert not found["not_finite"]["moved"]
        assert "with the samples of row 3;" in found["not_finite"]["error"]


def test_a_gradient_that_is_not_finite_is_traced_by_ranks_without_its_pixels(both: Both) -> None:
    seeing = [group.task_id for group in batch_of(0).groups if group.images]
    assert 0 < len(seeing) < len(batch_of(0).groups)
    for found in both:
        assert f"with the samples of {', '.join(seeing[:3])};" in found["bad_gradient"]["error"]


def test_pixels_go_to_the_rank_that_has_their_rows(both: Both) -> None:
    all_images = sum(image.num_bytes for group in three_groups().groups for image in group.images)
    grpo, ppo = ([found["image_bytes"][name] for found in both] for name in ("grpo", "ppo"))
    for first, second in (grpo, ppo):
        assert first[0] + second[0] == all_images
        assert min(first[0], second[0]) > 0
    assert [scored for scored, _ in grpo] == [sent for _, sent in grpo], "the update has the rows of the log-probs"
    assert all(sent <= all_images for _, sent in ppo), "its minibatches have others, and no image goes twice"


def test_ranks_have_the_pixels_of_their_rows_after_memory_ran_out(both: Both) -> None:
    assert all(row["grad_norm"] > 0 for found in both for row in found["lowered"]["metrics"])
    assert both[0]["lowered"]["weights"] == both[1]["lowered"]["weights"]


def test_a_limit_on_the_kl_ends_the_passes_on_both(both: Both) -> None:
    for found in both:
        first = found["kl limit"]["metrics"][0]
        assert 1 <= first["epochs_run"] < 4
        assert first["kl/policy"] > 1e-5


def test_bfloat16_gradients_are_summed_in_float32_over_micro_batches_and_ranks(both: Both) -> None:
    """They and the shards are never rounded to the type of the passes.

    A tied embedding has two gradients in a pass, which autograd adds in that type before FSDP2 sees their sum.
    """
    for found in both:
        distances = found["bfloat16"]["distances"]
        tied = distances.pop("network.model.language_model.embed_tokens.weight")
        assert max(distances.values()) < 1e-6
        assert tied < 2**-9
        assert found["bfloat16"]["types"] == ["torch.float32"]


def test_a_rank_holds_its_shard_of_the_gradients_between_micro_batches(both: Both) -> None:
    for found in both:
        between = found["between_micro_batches"]
        assert between["micro_batches"] >= 5
        assert between["extra"] < 0.05 * between["whole"]
        assert between["shards"] == pytest.approx(between["whole"] / 2, rel=0.1)


@pytest.mark.parametrize("kind", SAVED)
def test_saved_on_two_loaded_on_one_and_the_reverse(kind: str, both: Both, saved_by_one: Found, folder: Path) -> None:
    """Optimizers, reference and critic included."""
    assert_as_one_process([found["saved"][kind] for found in both], loaded(ALONE, folder / "by two", kind))
    assert_as_one_process([found["loaded"][kind] for found in both], saved_by_one[kind])
    names = [sorted(path.name for path in (folder / name / kind).iterdir()) for name in ("by one", "by two")]
    assert names[0] == names[1]


def test_every_rank_writes_its_half_and_no_more(both: Both, folder: Path) -> None:
    for part in ("trainable", "trainable_optimizer"):
        whole = (folder / "by one" / "grpo" / part / "rank-00000.safetensors").stat().st_size
        halves = [path.stat().st_size for path in sorted((folder / "by two" / "grpo" / part).iterdir())]
        assert halves == pytest.approx([whole / 2, whole / 2], rel=0.1)


def test_the_first_of_two_replicas_is_written_and_both_read_it(both: Both, folder: Path) -> None:
    assert [found["replicas"]["read"] for found in both] == [True, True]
    assert saved_tensors(folder / "replicas")["x"].shape == (6, 2)
    assert (folder / "replicas" / "rank-00000.safetensors").stat().st_size > 12 * 4
    assert load_file(folder / "replicas" / "rank-00001.safetensors") == {}
