"""A Hugging Face folder as a Megatron model: the logits of transformers, and the same tensors back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import extract_stack
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fovea.config.model import Model
from fovea.models.load import load_network
from fovea.models.plain import PlainRow, PlainVLM, plain_states
from fovea.models.processor import load_processor
from fovea.models.tiny import TinyParts
from fovea.train.megatron.model import MegatronModel, skeleton
from fovea.train.megatron.parallel import ParallelRank
from tests.tiny_models import image, renderer, save, tiny, user
from tests.train.megatron.equal_steps import settings_of
from tests.train.megatron.model_folder import FAMILIES, exchange, read_all, write

TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """One model in two libraries, and rows for it."""

    by_megatron: MegatronModel
    by_transformers: nn.Module
    shape: PlainVLM
    rows: list[PlainRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exports:
    """Folders of one version of transformers with a model of each family, and what either version reads in them."""

    models: Path
    by_version_4: Path
    by_version_5: Path


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Exports]:
    """Exports of tiny models by the version that wrote them: 4 for Megatron, 5 where the torch backend trains."""
    made = {}
    for version in (4, 5):
        folders = {name: tmp_path_factory.mktemp(name) for name in ("models", "by_version_4", "by_version_5")}
        made[version] = Exports(**folders)
    write(made[4].models)
    exchange(made[4].models, made[5].models, made[4].by_version_5, made[5].by_version_5)
    for each in made.values():
        read_all(each.models, each.by_version_4)
    return made


@pytest.mark.parametrize("writer", [4, 5])
def test_both_versions_of_transformers_read_the_same_model(writer: int, exports: dict[int, Exports]) -> None:
    written = exports[writer]
    for family in FAMILIES:
        old, new = (np.load(out / f"{family}.npz") for out in (written.by_version_4, written.by_version_5))
        assert (str(old["version"])[:5], str(new["version"])[:2]) == ("4.57.", "5.")
        for name in ("token_ids", "images", "positions"):
            np.testing.assert_array_equal(old[name], new[name], err_msg=f"{name} of {family}")
        np.testing.assert_allclose(old["logprobs"], new["logprobs"], atol=TOLERANCE, rtol=0, err_msg=family)


@pytest.fixture(scope="module", params=FAMILIES)
def both(request: pytest.FixtureRequest, exports: dict[int, Exports]) -> Iterator[Both]:
    folder = exports[5].models / request.param
    network = load_network(Model(path=str(folder), dtype="float32"))
    parts = TinyParts(network=network, processor=load_processor(Model(path=str(folder))))
    train = {"backend": {"name": "megatron"}, "gradient_checkpointing": "full"}
    config = settings_of(folder, train=train)
    shape = skeleton(config.model, load_processor(config.model).banned_ids, config.seed)
    model = MegatronModel(config, config.model, shape, ParallelRank.setup(config, shape.device))
    yield Both(by_megatron=model, by_transformers=parts.network, shape=shape, rows=rows_of(parts))
    parallel_state.destroy_model_parallel()


def test_a_frozen_router_is_not_trained(tmp_path: Path) -> None:
    config = settings_of(save(tiny("qwen3_vl_moe"), tmp_path), train={"backend": {"name": "megatron"}})
    frozen = config.model.model_copy(update={"freeze_router": True})
    shape = skeleton(frozen, [], config.seed)
    model = MegatronModel(config, frozen, shape, ParallelRank.setup(config, shape.device))
    trained = {name: parameter.requires_grad for name, parameter in model.module.named_parameters()}
    parallel_state.destroy_model_parallel()
    assert [name for name, is_trained in trained.items() if not is_trained] == [n for n in trained if ".router." in n]


def test_rows_are_packed_on_the_device_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is a GPU, in whose place stands a device without memory; the processes' groups are chosen by it."""
    model = settings_of(save(tiny("qwen3_vl"), tmp_path)).model
    monkeypatch.setattr("fovea.train.megatron.model.pick_device", lambda _device: torch.device("meta"))
    assert skeleton(model, [0], seed=0).device == torch.device("meta")


def rows_of(parts: TinyParts) -> list[PlainRow]:
    """No image, one, and three of unequal sizes."""
    render = renderer(parts)
    prompts = [
        render.prompt(user("What colour is the square?")),
        render.prompt(user(image(1), "How many circles?")),
        render.prompt(user(image(2), " with ", image(3, 64, 96), ", not ", image(4, 96, 48), ": how many circles?")),
    ]
    return [
        PlainRow(token_ids_L=torch.tensor(prompt.token_ids_L), images=prompt.images, hidden_index_A=[])
        for prompt in prompts
    ]


@torch.no_grad()
def test_its_logits_are_those_of_transformers(both: Both) -> None:
    theirs_RLE = plain_states(both.by_transformers, both.shape.family, both.rows, torch.float32)
    for row, ours_LE, theirs_LE in zip(both.rows, states_of_rows(both.by_megatron, both.rows), theirs_RLE, strict=True):
        ours = ours_LE @ both.by_megatron.head.t()
        theirs = theirs_LE[: len(row.token_ids_L)] @ both.by_transformers.lm_head.weight.t()
        assert theirs.std() > 0.1, "logits that say nothing"
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_packed_row_sees_no_other(both: Both, changed: int) -> None:
    ids_L = both.rows[changed].token_ids_L.clone()
    ids_L[[0, -1]] += 1  # no token of an image, so that the rows keep their lengths
    others = [replace(row, token_ids_L=ids_L) if n == changed else row for n, row in enumerate(both.rows)]
    before, after = (states_of_rows(both.by_megatron, rows) for rows in (both.rows, others))
    distances = [float((new - old).abs().max()) for old, new in zip(before, after, strict=True)]
    assert [distance > 0 for distance in distances] == [number == changed for number in range(len(others))]


class ReadsOfPositions(TorchFunctionMode):
    """Counts the reads of a tensor in Megatron's code for rotary positions; the host waits for a GPU at each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__):
            self.count += any(frame.filename == rope_utils.__file__ for frame in extract_stack())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 3])
def test_rotary_positions_of_packed_rows_read_nothing(both: Both, rows: int) -> None:
    """In a pass and in recomputed layers: Megatron reads the ends of all rows twice per layer, on a GPU one by one."""
    with ReadsOfPositions() as reads:
        sum(states.sum() for states in states_of_rows(both.by_megatron, both.rows[:rows])).backward()
    assert reads.count == 0


def states_of_rows(model: MegatronModel, rows: list[PlainRow]) -> list[Tensor]:
    """States [L, E] of each row, from one pass over all."""
    packed = model.pack(rows)
    assert packed.num_tokens == sum(len(row.token_ids_L) for row in rows)
    return list(model.states(model.chunk, packed)[:, 0].split([len(row.token_ids_L) for row in rows]))


def test_every_tensor_comes_back_as_it_was(both: Both) -> None:
    given = dict(both.by_transformers.named_parameters())
    back: dict[str, Tensor] = {weight.name: weight.parameter for weight in both.by_megatron.weights_to_sync()}
    assert back.keys() == given.keys()
    assert all(torch.equal(back[name], weight) for name, weight in given.items())
