"""A model with experts that two ranks have trained: saved by both, exported by both, read by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from fovea.train.ranks import ALONE, Ranks
from fovea.train.torch.policy import TorchPolicy
from tests.process_ranks import run_group
from tests.reference import model_inputs
from tests.saved import save_policy
from tests.tiny_models import tiny
from tests.train.rank_policies import batch_of, policy_of, step

FAMILY = "qwen3_vl_moe"


def policy_with_experts(ranks: Ranks) -> TorchPolicy:
    return policy_of(ranks, {"kl": {"coef": 0.05}}, family=FAMILY)


def process(rank: int, folder: Path) -> None:
    policy = policy_with_experts(Ranks.of_process_group("cpu"))
    step(policy, batch_of(0, FAMILY))
    save_policy(policy, folder / "checkpoint")
    policy.export(folder / "exported")


@pytest.mark.slow
def test_what_two_ranks_export_is_what_they_have_saved_as_transformers_reads_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    run_group(process, tmp_path)

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
