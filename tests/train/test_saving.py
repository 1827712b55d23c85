"""What is said of a policy's checkpoint that cannot be read or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.errors import TrainError
from tests.policies import make_batch, make_policy
from tests.saved import save_policy
from tests.tiny_models import tiny


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
    with pytest.raises(TrainError, match=r"elsewhere is not there on .*; put run_dir on storage that all machines see"):
        policy.save(tmp_path / "elsewhere")
    save_policy(policy, tmp_path)
