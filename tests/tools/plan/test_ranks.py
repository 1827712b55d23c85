"""`fovea plan` against the peak of an update of one of two ranks, whose weights and gradients are sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fovea.config.run import Config
from fovea.models.tiny import TinyParts
from fovea.train.ranks import Ranks
from fovea.train.torch.policy import make_policy
from fovea.types import Batch
from fovea.wiring.model import make_vlm
from fovea_tools.plan.plan import make_plan
from tests.policies import make_batch
from tests.tiny_models import save, tiny
from tests.tools.plan.published import wide
from tests.tools.plan.saved import peak_of_update
from tests.warm import run_ranks

GROUPS = 6
TOLERANCE = 0.15
CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, LoRA": {"dtype": "bfloat16", "lora": {"rank": 4}},
}


def wide_model() -> TinyParts:
    return tiny("qwen3_vl", num_layers=12, **wide("qwen3_vl"))


def config_of(case: str, place: dict[str, Any], batch: Batch) -> Config:
    """A group to a micro-batch, of which each rank has three."""
    group = batch.groups[0]
    lengths = [len(sample.token_ids_T) for sample in group.samples]
    return Config.model_validate(
        {
            "model": {"device": "cpu", **CASES[case], **place},
            "train": {"enable_dynamic_batch_size": False, "groups_per_microbatch": 1},
            "rollout": {"prompts_per_step": GROUPS, "samples_per_prompt": len(lengths), "max_new_tokens": max(lengths)},
            "plan": {
                **{"gpu": "cpu", "gpus": 2, "distinct_images": 1},
                "prompt_tokens": group.prompt.num_tokens,
                "image_tokens": group.prompt.images[0].num_tokens,
                "completion_tokens": round(sum(lengths) / len(lengths)),
            },
        }
    )


def batch_of(parts: TinyParts) -> Batch:
    """Equal groups, as a plan assumes."""
    return Batch(groups=make_batch(parts).groups[:1] * GROUPS)


def measured(case: str, ranks: Ranks) -> int:
    parts = wide_model()
    batch = batch_of(parts)
    config = config_of(case, {"tiny": {"family": "qwen3_vl"}}, batch)
    network = parts.network.to(getattr(torch, config.model.dtype))
    policy = make_policy(config, make_vlm(config, network, parts.processor.banned_ids), ranks=ranks)
    return peak_of_update(policy, batch)


def process(_: int, found: Path) -> None:
    torch.set_num_threads(1)
    # gloo copies what it sends, and frees the copies in its own threads, where the trace does not see it
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ranks = Ranks.of_process_group("cpu")
    found.write_text(json.dumps({case: measured(case, ranks) for case in CASES}))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    found = tmp_path_factory.mktemp("ranks") / "peaks.json"
    run_ranks(process, (found,), nprocs=1)
    peaks: dict[str, int] = json.loads(found.read_text())
    return peaks


@pytest.mark.parametrize("case", CASES)
def test_peak_of_an_update_on_two_ranks_is_the_measured_one(case: str, peaks: dict[str, int], tmp_path: Path) -> None:
    parts = wide_model()
    plan = make_plan(config_of(case, {"path": str(save(parts, tmp_path))}, batch_of(parts)))
    assert plan.microbatches == GROUPS / 2
    update = plan.phases[1]
    held = sum(update.parts.get(part, 0) for part in ("parameters", "optimizer", "engine's weights"))
    assert update.total - held == pytest.approx(peaks[case], rel=TOLERANCE)
