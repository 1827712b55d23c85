"""Models of many kinds on two ranks, and on four as two replicas, against one process; `test_ranks` has the errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from fovea.config.model import Model
from fovea.models.families.registry import FAMILIES
from fovea.models.load import load_network
from fovea.models.processor import load_processor
from fovea.models.tiny import TinyParts
from fovea.train.ranks import ALONE, Ranks
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch
from fovea_tools.families.tiny import save_tiny_kind
from tests.augmentations import MASK
from tests.policies import make_batch
from tests.process_ranks import found_by_ranks, run_group
from tests.reference import model_inputs
from tests.saved import save_policy
from tests.tiny_models import CORPUS, mixed_prompts, tiny
from tests.train.rank_policies import GRPO as WITH_ENTROPY
from tests.train.rank_policies import (
    SEPARATE,
    Found,
    assert_as_one_process,
    batch_of,
    checksum,
    policy_of,
    rewarded,
    step,
)

PLAIN: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "qwen": ("qwen3_vl", WITH_ENTROPY, {}),
    "auto": ("glm4v", WITH_ENTROPY, {}),
    "ppo": ("llava", SEPARATE, {}),
    "frozen": ("llava", WITH_ENTROPY, {"freeze_vision_tower": True}),
    "lora": ("gemma3", WITH_ENTROPY, {"lora": {"rank": 4}}),
    "tiles on the fast path": ("internvl", WITH_ENTROPY, {"fast_path": "auto"}),
}


def parts_of(kind: str, folder: Path) -> TinyParts:
    if kind == "qwen3_vl":
        return tiny(kind)
    settings = Model(path=str(folder / kind), family="named" if kind in FAMILIES else "auto")
    return TinyParts(network=load_network(settings), processor=load_processor(settings))


def run_plain(name: str, ranks: Ranks, folder: Path) -> Found:
    """The groups have one image, two and none; in the second batch there is one, so that a rank has only a filler."""
    kind, algorithm, model = PLAIN[name]
    parts = parts_of(kind, folder)
    first = rewarded((*make_batch(parts).groups, make_batch(parts, 100).groups[2]), seed=0)
    more = {"model": {"fast_path": "off", **model}, "train": {"max_tokens_per_microbatch": 130}}
    policy = policy_of(ranks, algorithm, parts=parts, **more)
    metrics = [step(policy, first), step(policy, replace(first, groups=first.groups[:1]))]
    return {"metrics": metrics, "weights": checksum(policy)}


def plain_process(rank: int, folder: Path) -> dict[str, Found]:
    ranks = Ranks.of_process_group("cpu")
    return {name: run_plain(name, ranks, folder) for name in PLAIN}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plain")
    for kind in {kind for kind, _, _ in PLAIN.values()} - {"qwen3_vl"}:
        save_tiny_kind(kind, made / kind, CORPUS)
    return made


@pytest.fixture(scope="module")
def both(folder: Path) -> list[dict[str, Found]]:
    return found_by_ranks(plain_process, folder, folder=folder)


@pytest.mark.parametrize("name", PLAIN)
def test_two_ranks_equal_one_process(name: str, both: list[dict[str, Found]], folder: Path) -> None:
    assert_as_one_process([found[name] for found in both], run_plain(name, ALONE, folder))


STEPS = 5
GRPO = {"kl": {"coef": 0.05}}
PPO = {"name": "ppo", "minibatches": 2}
SELECTIVE = {"gradient_checkpointing": "selective"}
OFFLOADED = {"backend": {"cpu_offload": True}, "gradient_checkpointing": "full"}
FROZEN = {"freeze_vision_tower": True}
PROJECTOR = {"freeze_vision_tower": True, "freeze_projector": False}
TOWER = {"freeze_projector": True}
LORA = {"lora": {"rank": 4}}
PAPO = {"augmentation": {"name": "papo", "coef": 0.3}}
VPPO = {"augmentation": {"name": "vppo"}}
BOTH_VIEWS = {"max_tokens_per_microbatch": 150}


Case = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
"""Family, algorithm, and settings of model and train."""
TWO: dict[str, Case] = {
    "grpo": ("qwen2_vl", GRPO, {}, SELECTIVE),
    "grpo, frozen tower": ("qwen2_5_vl", GRPO, FROZEN, {}),
    "grpo, lora": ("qwen3_vl", GRPO, LORA, SELECTIVE),
    "grpo, projector": ("qwen3_vl", GRPO, PROJECTOR, SELECTIVE),
    "grpo, offloaded": ("qwen3_vl", GRPO, {}, OFFLOADED),
    "grpo, text on one": ("qwen2_5_vl", GRPO, {}, {}),
    "papo": ("qwen3_vl", PAPO, {}, BOTH_VIEWS),
    "vppo": ("qwen2_5_vl", VPPO, {}, BOTH_VIEWS),
    "ppo": ("qwen2_5_vl", PPO, {}, {}),
    "ppo, frozen tower": ("qwen3_vl", PPO, FROZEN, {}),
    "ppo, lora": ("qwen2_vl", PPO, LORA, {}),
    "ppo, tower without projector": ("qwen2_vl", PPO, TOWER, {}),
    "ppo, text on one": ("qwen3_vl", PPO, {}, {}),
}
FOUR: dict[str, Case] = {
    "grpo": ("qwen3_vl", GRPO, {}, SELECTIVE),
    "grpo, frozen tower": ("qwen2_vl", GRPO, FROZEN, OFFLOADED),
    "ppo, lora": ("qwen2_5_vl", PPO, LORA, {}),
}


def matrix_batch(name: str, case: Case, seed: int) -> Batch:
    batch = batch_of(seed, case[0])
    if "augmentation" in case[1]:
        masked = itemgetter(0, 1, 2, 1, 2)(mixed_prompts(tiny(case[0]), MASK))
        groups = zip(batch.groups, masked, strict=True)
        return replace(batch, groups=tuple(replace(group, masked=prompt) for group, prompt in groups))
    # two groups, one with an image: a rank has text only
    return Batch(groups=(batch.groups[0], batch.groups[2])) if "text on one" in name else batch


def run(name: str, case: Case, ranks: Ranks) -> Found:
    family, algorithm, model, train = case
    policy = policy_of(ranks, algorithm, family=family, model=model, train=train)
    metrics = [step(policy, matrix_batch(name, case, seed)) for seed in range(STEPS)]
    return {"metrics": metrics, "weights": checksum(policy)}


def matrix_process(rank: int, cases: dict[str, Case], replicas: int) -> dict[str, Found]:
    ranks = Ranks.of_process_group("cpu", replicas=replicas)
    return {name: run(name, case, ranks) for name, case in cases.items()}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return found_by_ranks(matrix_process, TWO, 1, folder=tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return found_by_ranks(matrix_process, FOUR, 2, folder=tmp_path_factory.mktemp("four"), num_ranks=4)


def assert_five_steps(found: Sequence[Found], alone: Found) -> None:
    assert len(alone["metrics"]) == STEPS
    assert all(row["grad_norm"] > 0 for row in alone["metrics"])
    assert_as_one_process(found, alone)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_train_as_one_process(name: str, two: list[dict[str, Found]]) -> None:
    assert_five_steps([found[name] for found in two], run(name, TWO[name], ALONE))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", FOUR)
def test_two_replicas_of_two_ranks_train_as_one_process(name: str, four: list[dict[str, Found]]) -> None:
    assert_five_steps([found[name] for found in four], run(name, FOUR[name], ALONE))


FAMILY = "qwen3_vl_moe"


def policy_with_experts(ranks: Ranks) -> TorchPolicy:
    return policy_of(ranks, {"kl": {"coef": 0.05}}, family=FAMILY)


def exporting_process(rank: int, folder: Path) -> None:
    policy = policy_with_experts(Ranks.of_process_group("cpu"))
    step(policy, batch_of(0, FAMILY))
    save_policy(policy, folder / "checkpoint")
    policy.export(folder / "exported")


@pytest.mark.slow
def test_what_two_ranks_export_is_what_they_have_saved_as_transformers_reads_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    run_group(exporting_process, tmp_path)

    alone, parts = policy_with_experts(ALONE), tiny(FAMILY)
    untrained = {name: weight.clone() for name, weight in alone.vlm.network.named_parameters()}
    alone.load(tmp_path / "checkpoint")
    trained = dict(alone.vlm.network.named_parameters())
    changed = [name for name, weight in trained.items() if not torch.equal(weight, untrained[name])]
    assert any("experts" in name for name in changed)
    alone.export(tmp_path / "alone")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("exported", "alone")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])

    network, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not info["missing_keys"]
    group = batch_of(0, FAMILY).groups[0]
    inputs = model_inputs(parts, group.prompt, group.samples[0].token_ids_T)
    # transformers' own module of the same class, with the weights of the checkpoint
    parts.network.load_state_dict(trained, strict=False)
    parts.network.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected, found = (each(**inputs, use_cache=False).logits for each in (parts.network, network))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
