"""A model that one of two processes reads, over a real process group: the same network in both."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fovea.config.model import Model
from fovea.models.load import load_network
from fovea.models.tiny import save_tiny
from fovea.train.ranks import Ranks
from fovea.wiring.model import load_on_ranks
from fovea_gym.errors import FoveaError
from tests.tiny_models import CPU, FAMILIES, tiny
from tests.warm import run_ranks

PATIENCE = timedelta(seconds=120)
DTYPES = ("float32", "bfloat16")


def process(rank: int, port: int, folder: Path) -> None:
    """Each rank has a separate folder, the second one without any weights."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    ranks = Ranks.of_process_group("cpu")
    found: dict[str, Any] = {}
    for family in FAMILIES:
        for dtype in DTYPES:
            settings = Model(path=str(folder / str(rank) / family), dtype=dtype)
            network = load_on_ranks(settings, CPU, ranks)
            found[f"{family} {dtype}"] = {
                "tensors": dict(network.named_parameters()) | dict(network.named_buffers()),
                "is_tied": network.get_input_embeddings().weight is network.get_output_embeddings().weight,
                "trains": {name for name, x in network.named_parameters() if x.requires_grad},
                "training": network.training,
                "config": str(network.config.to_dict()).replace(settings.name, ""),
                "attention": network.config._attn_implementation,
            }
    try:
        load_on_ranks(Model(path=str(folder / str(rank) / "damaged")), CPU, ranks)
    except FoveaError as error:
        found["damaged"] = f"{type(error).__name__}: {error}"
    torch.save(found, folder / f"found-{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("loading")
    for family in FAMILIES:
        save_tiny(tiny(family), folder / "0" / family)
    shutil.copytree(folder / "0" / FAMILIES[0], folder / "0/damaged")
    shutil.copytree(folder / "0", folder / "1", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "0/damaged/model.safetensors").write_bytes(b"damaged")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    run_ranks(process, (store.port, folder), nprocs=2)
    first, second = (torch.load(folder / f"found-{rank}", weights_only=False) for rank in range(2))
    return first, second, folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_process_without_the_weights_has_the_network_of_the_first(
    family: str, dtype: str, ends: tuple[dict[str, Any], dict[str, Any], Path]
) -> None:
    """Bit for bit and in the same types, rotary frequencies included, and as a single process reads it."""
    first, second, folder = ends
    ours, theirs = first[f"{family} {dtype}"], second[f"{family} {dtype}"]
    alone = load_network(Model(path=str(folder / "0" / family), dtype=dtype))
    tensors = dict(alone.named_parameters()) | dict(alone.named_buffers())
    for found in (ours["tensors"], theirs["tensors"]):
        assert list(found) == list(tensors)
        assert all(found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in tensors.items())
    assert {**ours, "tensors": None} == {**theirs, "tensors": None}


def test_an_error_of_the_first_process_is_raised_in_all(ends: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    first, second, _ = ends
    assert first["damaged"].startswith("ModelError: model.path=")
    assert "rank 0: model.path=" in second["damaged"]
