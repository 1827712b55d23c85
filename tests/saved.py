"""Saving a policy, and its tensors read only by torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from fovea.train.torch.policy import TorchPolicy


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    reader = dcp.HuggingFaceStorageReader(str(folder))
    entries = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it reads in one process
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def save_policy(policy: TorchPolicy, folder: Path) -> None:
    policy.save(folder)
    policy.finish_save()


def saved_bytes(folder: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in saved_tensors(folder).items()}


def make_checkpoint(run: Path, step: int) -> Path:
    """A checkpoint as far as names go: a folder with one file."""
    folder = run / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "state.json").touch()
    return folder
