"""Checkpoints and exports: shards beside those of torch, broken files, and what transformers reads."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForImageTextToText

from fovea.config.model import Model
from fovea.errors import TrainError
from fovea.models.load import load_network
from fovea.train.ranks import ALONE
from fovea.train.torch.checkpoint import SavedShards, StagedShards
from tests.models.banned_ids import favour_banned_ids
from tests.policies import make_batch, make_policy
from tests.reference import model_inputs
from tests.runs import ROOT, environment
from tests.saved import save_policy, saved_tensors
from tests.tiny_models import mixed_prompts, tiny


def test_a_broken_checkpoint_is_one_line(tmp_path: Path) -> None:
    policy = make_policy(tiny("qwen3_vl"))
    policy.update(make_batch(tiny("qwen3_vl")))
    save_policy(policy, tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.relative_to(tmp_path).parts[0] for path in files}
    assert names == {"trainable", "trainable_optimizer", "policy.json"}
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


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(6, 4, generator=generator),
        "transposed": torch.randn(3, 5, generator=generator).T,
        "vector": torch.randn(7, generator=generator).bfloat16(),
        "count": torch.tensor(3.0),
    }


def assert_same(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_torchs_own_reader_reads_them(tmp_path: Path) -> None:
    StagedShards.of(tensors(), ALONE).write(tmp_path / "trainable", 0)
    assert_same(saved_tensors(tmp_path / "trainable"))


def test_those_of_torchs_own_writer_are_read(tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it writes in one process
        dcp.save({name: x.contiguous() for name, x in tensors().items()}, storage_writer=writer, no_dist=True)
    found = {name: torch.zeros_like(x) for name, x in tensors().items()}
    SavedShards(tmp_path).copy_into(found)
    assert_same(found)


def test_a_copy_is_not_changed_by_what_follows(tmp_path: Path) -> None:
    live = tensors()
    staged = StagedShards.of(live, ALONE)
    for tensor in live.values():
        tensor.zero_()
    staged.write(tmp_path / "trainable", 0)
    assert_same(saved_tensors(tmp_path / "trainable"))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_file_of_shards_that_is_missing_is_seen(missing: int, tmp_path: Path) -> None:
    """Of the tensor [6, 4] in three parts; without the last one, nothing tells but the shape."""
    for rank, rows in enumerate(tensors()["matrix"].split(2)):
        StagedShards(shards={"matrix": rows.clone()}, offsets={"matrix": [2 * rank, 0]}).write(tmp_path, rank)
    assert SavedShards(tmp_path).shapes == {"matrix": (6, 4)}
    (tmp_path / f"rank-{missing:05}.safetensors").unlink()
    with pytest.raises(TrainError, match=r"cannot be read \(shards of matrix are missing\)"):
        SavedShards(tmp_path)


def test_a_folder_that_this_machine_does_not_see_is_no_damaged_one(tmp_path: Path) -> None:
    """As on a second machine without the shared disk: its message must not have checkpoints deleted."""
    with pytest.raises(TrainError, match=r"step-1: no such folder on .*; put run_dir where all machines"):
        SavedShards(tmp_path / "step-1" / "trainable")
    with pytest.raises(TrainError, match=r"cannot be read \(trainable has no shards\); delete its folder"):
        SavedShards(tmp_path / "trainable")


MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from fovea.metrics.log import peak_rss_gib
from fovea.train.ranks import ALONE
from fovea.train.torch.checkpoint import StagedShards

tensors = {str(index): torch.randn(8 * 2**20) for index in range(8)}
before, pauses, done = peak_rss_gib(), [], threading.Event()

def count() -> None:
    last = time.perf_counter()
    while not done.is_set():
        time.sleep(0.001)
        now = time.perf_counter()
        pauses.append(now - last)
        last = now

staged = StagedShards.of(tensors, ALONE)
other = threading.Thread(target=count)
other.start()
start = time.perf_counter()
staged.write(Path(sys.argv[1]), 0)
seconds = time.perf_counter() - start
done.set()
other.join()
print(peak_rss_gib() - before, len(pauses), seconds)
"""


def test_a_save_needs_one_copy_in_host_memory_and_lets_python_go_on(tmp_path: Path) -> None:
    """Of 256 MiB; torch's own writer of this format takes three copies, and no other thread runs meanwhile."""
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    gib, runs_of_the_other, _seconds = map(float, done.stdout.split())
    assert 0.9 * 0.25 < gib < 1.1 * 0.25
    assert runs_of_the_other > 5
