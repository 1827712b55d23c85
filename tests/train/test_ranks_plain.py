"""transformers' own forward on two real processes, weights sharded: the losses, norms and weights of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.models.families.registry import FAMILIES
from fovea.models.load import load_network
from fovea.models.processor import load_processor
from fovea.models.tiny import TinyParts
from fovea.samples import replace_samples
from fovea.train.ranks import ALONE, Ranks
from fovea.train.torch.policy import TorchPolicy, make_policy
from fovea.types import Batch
from fovea.wiring.model import make_vlm
from fovea_tools.families.tiny import save_tiny_kind
from tests.policies import make_batch
from tests.process_ranks import found_by_ranks
from tests.tiny_models import CORPUS, tiny
from tests.train.rank_policies import GRPO, SEPARATE, Found, assert_as_one_process, checksum, step

CASES: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "qwen": ("qwen3_vl", GRPO, {}),
    "auto": ("glm4v", GRPO, {}),
    "ppo": ("llava", SEPARATE, {}),
    "frozen": ("llava", GRPO, {"freeze_vision_tower": True}),
    "lora": ("gemma3", GRPO, {"lora": {"rank": 4}}),
    "tiles on the fast path": ("internvl", GRPO, {"fast_path": "auto"}),
}


def parts_of(kind: str, folder: Path) -> TinyParts:
    if kind == "qwen3_vl":
        return tiny(kind)
    settings = Model(path=str(folder / kind), family="named" if kind in FAMILIES else "auto")
    return TinyParts(network=load_network(settings), processor=load_processor(settings))


def batch_of(parts: TinyParts, seed: int) -> Batch:
    """Groups with one image, two and none, in an order that leaves a rank without images."""
    rng = np.random.default_rng(seed)
    groups = (*make_batch(parts, seed).groups, *make_batch(parts, seed + 100).groups[2:])
    named = (replace(group, task_id=f"row {index}") for index, group in enumerate(groups))
    return replace_samples(Batch(groups=tuple(named)), lambda sample: replace(sample, reward=float(rng.normal())))


def case(name: str, ranks: Ranks, folder: Path) -> Found:
    kind, algorithm, model = CASES[name]
    parts = parts_of(kind, folder)
    config = Config.model_validate(
        {
            "model": {"tiny": {}, "fast_path": "off", "device": "cpu", **model},
            "algorithm": algorithm,
            "train": {"learning_rate": 1e-3, "lr_warmup_steps": 0, "max_tokens_per_microbatch": 130},
            "max_steps": 10,
        }
    )
    policy: TorchPolicy = make_policy(config, make_vlm(config, parts.network, parts.processor.banned_ids), ranks=ranks)
    # the second batch has one group, so that a rank has nothing but a filler
    first = batch_of(parts, 0)
    metrics = [step(policy, first), step(policy, replace(first, groups=first.groups[:1]))]
    return {"metrics": metrics, "weights": checksum(policy)}


def process(rank: int, folder: Path) -> dict[str, Found]:
    ranks = Ranks.of_process_group("cpu")
    return {name: case(name, ranks, folder) for name in CASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plain")
    for kind in {kind for kind, _, _ in CASES.values()} - {"qwen3_vl"}:
        save_tiny_kind(kind, made / kind, CORPUS)
    return made


@pytest.fixture(scope="module")
def both(folder: Path) -> list[dict[str, Found]]:
    return found_by_ranks(process, folder, folder=folder)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(name: str, both: list[dict[str, Found]], folder: Path) -> None:
    assert_as_one_process([found[name] for found in both], case(name, ALONE, folder))
