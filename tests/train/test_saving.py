"""A policy's checkpoints that cannot be read or written, and its export, as transformers reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from fovea.config.model import Model
from fovea.errors import TrainError
from fovea.models.load import load_network
from tests.models.banned_ids import favour_banned_ids
from tests.policies import make_batch, make_policy
from tests.reference import model_inputs
from tests.saved import save_policy
from tests.tiny_models import mixed_prompts, tiny


def test_a_broken_checkpoint_is_one_line(tmp_path: Path) -> None:
    policy = make_policy(tiny("qwen3_vl"))
    policy.update(make_batch(tiny("qwen3_vl")))
    save_policy(policy, tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path).parts[0] for path in files} == {
        "trainable",
        "trainable_optimizer",
        "policy.json",
    }
    for file in files:
        content = file.read_bytes()
        for broken in (b"x", content[: len(content) // 2]):
            file.write_bytes(broken)
            with pytest.raises(TrainError, match=r"this checkpoint cannot be read .*; delete its folder to resume"):
                policy.load(tmp_path)
        file.unlink()
        with pytest.raises(TrainError, match=r"this checkpoint cannot be read .*; delete its folder to resume"):
            policy.load(tmp_path)
        file.write_bytes(content)
    policy.load(tmp_path)


def test_a_folder_that_this_machine_does_not_see_is_said_before_anything_is_written(tmp_path: Path) -> None:
    policy = make_policy(tiny("qwen3_vl"))
    with pytest.raises(TrainError, match=r"elsewhere does not exist on .*; put run_dir on storage that all"):
        policy.save(tmp_path / "elsewhere")
    save_policy(policy, tmp_path)


def test_an_exported_policy_is_read_by_transformers(tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    policy = make_policy(parts, lr_warmup_steps=0)
    policy.update(make_batch(parts))
    policy.export(tmp_path)
    reloaded = dict(load_network(Model(path=str(tmp_path))).named_parameters())
    trained = dict(parts.network.named_parameters())
    assert reloaded.keys() == trained.keys()
    assert all(torch.equal(reloaded[name], trained[name]) for name in trained)


def test_transformers_generate_never_draws_a_banned_token_of_an_exported_model(tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    favour_banned_ids(parts)
    make_policy(parts).export(tmp_path)
    network = AutoModelForImageTextToText.from_pretrained(tmp_path)
    inputs = model_inputs(parts, mixed_prompts(parts)[2], np.array([5]))
    length, banned = inputs["input_ids"].shape[1], torch.tensor(parts.processor.banned_ids)
    torch.manual_seed(0)
    asked = {"do_sample": True, "max_new_tokens": 8, "num_return_sequences": 64}
    drawn = network.generate(**inputs, **asked)[:, length:]
    pads = torch.tensor([parts.processor.tokenizer.pad_token_id])
    ended = (drawn == parts.processor.stop_ids[0]).cumsum(1) > 0
    assert not (torch.isin(drawn, banned) & ~ended).any()
    assert torch.isin(drawn[ended], torch.cat([pads, torch.tensor(parts.processor.stop_ids)])).all()
    network.generation_config.suppress_tokens = None
    raw = network.generate(**inputs, **asked)[:, length:]
    assert torch.isin(raw[:, 0], banned).any(), "without the bans there are some in so many draws"
