"""Models of Hugging Face folders by Megatron and by transformers 4: logits, tensors, and scores over slices."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import extract_stack
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fovea.config.model import Model
from fovea.models.head_gradients import LossGradients
from fovea.models.load import load_network, save_network
from fovea.models.plain import PlainRow, PlainVLM, plain_states
from fovea.models.processor import load_processor
from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.tiny import TinyParts
from fovea.models.token_logprobs import TokenScores, token_scores
from fovea.models.vlm import VLM
from fovea.train.megatron.model import MegatronModel, skeleton
from fovea.train.megatron.parallel import ParallelRank
from fovea.train.megatron.sharded_logprobs import VocabularySlice, sharded_token_scores
from fovea.train.packing import pack_row
from tests.models.banned_ids import ACTIONS, BANNED, VOCABULARY, inputs
from tests.rollout.drawing import generate, make_engine, seeded
from tests.tiny_models import CPU, image, mixed_prompts, renderer, save, tiny, user
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
    chats = [
        user("What colour is the square?"),
        user(image(1), "How many circles?"),
        user(image(2), " with ", image(3, 64, 96), ", not ", image(4, 96, 48), ": how many circles?"),
    ]
    prompts = map(renderer(parts).prompt, chats)
    return [PlainRow(token_ids_L=torch.tensor(p.token_ids_L), images=p.images, hidden_index_A=[]) for p in prompts]


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


def test_this_environment_has_the_version_that_the_bridge_takes() -> None:
    assert transformers.__version__.startswith("4.57.")


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_give_the_log_probs_of_transformers(family: str) -> None:
    """No image, one, and two of unequal size; transformers' own forward makes its own positions."""
    parts = tiny(family)
    network = parts.network
    answer = np.array([5, 17, 3, 40])
    expected = []
    for prompt in mixed_prompts(parts):
        ids = torch.from_numpy(np.concatenate([prompt.token_ids_L, answer]))[None]
        images = [image.tensors for image in prompt.images]
        given = {
            name: torch.from_numpy(join([each[name] for each in images]))
            for name, join in (("pixel_values", np.concatenate), ("image_grid_thw", np.stack))
            if images
        }
        whole = network(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0]
        logits = whole[prompt.num_tokens - 1 : -1]
        logits[:, list(parts.processor.banned_ids)] = -torch.inf
        expected.append(logits.log_softmax(-1).gather(1, torch.from_numpy(answer)[:, None])[:, 0].detach())
    vlm = VLM(network, parts.processor.banned_ids)
    row = pack_row(vlm.family, mixed_prompts(parts), [[answer]] * 3, CPU)
    scores = vlm(row, temperature=1.0, chunk_tokens=100)
    torch.testing.assert_close(scores.logprobs_A.detach(), torch.cat(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_engine_draws_with_the_log_probs_of_packed_rows(family: str) -> None:
    parts = tiny(family)
    prompts = mixed_prompts(parts)
    groups = generate(make_engine(parts), prompts, seeded(3, max_new_tokens=6, temperature=0.8), n=2)
    row = pack_row(parts.processor.family, prompts, [[c.token_ids_T for c in group] for group in groups], CPU)
    scores = VLM(parts.network, parts.processor.banned_ids)(row, temperature=0.8, chunk_tokens=100)
    drawn = torch.from_numpy(np.concatenate([c.logprobs_T for group in groups for c in group]))
    torch.testing.assert_close(drawn, scores.logprobs_A, atol=TOLERANCE, rtol=0)


def test_experts_are_written_as_they_were_read(tmp_path: Path) -> None:
    """Unlike version 5, 4.57 holds them as files do."""
    parts = tiny("qwen3_vl_moe")
    save_network(VLM(parts.network, parts.processor.banned_ids), tmp_path)
    loaded = dict(load_network(Model(path=str(tmp_path), dtype="float32")).named_parameters())
    assert all(torch.equal(loaded[name], weight) for name, weight in parts.network.named_parameters())


@pytest.mark.parametrize("name", ["TokenizersBackend", "Qwen2Tokenizer"])
def test_a_tokenizer_in_the_names_of_version_5_is_read(name: str, tmp_path: Path) -> None:
    """As transformers 5.23 writes a tokenizer that is all in tokenizer.json, and Qwen's."""
    parts = tiny("qwen3_vl")
    save(parts, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    written = json.loads(config.read_text())
    special = written.pop("additional_special_tokens")
    config.write_text(json.dumps(written | {"tokenizer_class": name, "extra_special_tokens": special}))
    read, text = load_processor(Model(path=str(tmp_path))), "<|im_start|>user\n<|image_pad|>Zoë?<|im_end|>"
    assert read.tokenizer(text).input_ids == parts.processor.tokenizer(text).input_ids
    assert (read.banned_ids, read.stop_ids) == (parts.processor.banned_ids, parts.processor.stop_ids)


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_gradients_are_those_without_checkpointing(family: str) -> None:
    parts = tiny(family)
    answers = [[np.array([5, 17, 3, 40])]] * 3
    gradients = []
    how: Recompute
    for how in ("none", "full"):
        network = copy.deepcopy(parts.network)
        recompute_activations(network, how)
        vlm = VLM(network, parts.processor.banned_ids)
        vlm.train()
        row = pack_row(vlm.family, mixed_prompts(parts), answers, CPU)
        vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A.sum().backward()
        gradients.append({name: weight.grad for name, weight in network.named_parameters()})
    plain, recomputed = gradients
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=TOLERANCE, rtol=0, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_transformers_5_is_the_same_model(family: str, tmp_path: Path) -> None:
    """Version 5 writes the parameters of rotary positions under another key, which 4.57 passes over."""
    parts = tiny(family)
    save(parts, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}
    config.pop("rope_scaling", None), config.pop("rope_theta", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_network(Model(path=str(tmp_path), dtype="float32"))
    for name in ("rope_theta", "rope_scaling"):
        assert getattr(loaded.config.text_config, name) == getattr(parts.network.config.text_config, name)


def test_images_are_resized_to_the_limits_of_the_folder(tmp_path: Path) -> None:
    """4.57 itself takes its defaults in place of `size`, the only name by which version 5 writes limits."""
    save(tiny("qwen3_vl"), tmp_path)
    file = tmp_path / "preprocessor_config.json"
    written = json.loads(file.read_text())
    size = {"shortest_edge": 256, "longest_edge": 1 << 20}
    assert written["size"] == size
    file.write_text(json.dumps({key: x for key, x in written.items() if key not in ("min_pixels", "max_pixels")}))
    processor = load_processor(Model(path=str(tmp_path))).image_processor
    assert processor.size == size
    image = Image.new("RGB", (48, 48), "red")
    assert processor(images=[image])["image_grid_thw"].tolist() == [[1, 6, 6]], "it has been enlarged"
    assert type(processor).__name__ == written["image_processor_type"] == "Qwen2VLImageProcessor"


OF_LOGPROBS, OF_ENTROPIES = torch.linspace(-1, 2, ACTIONS), torch.linspace(0.5, -0.7, ACTIONS)
SETTINGS = {"temperature": 0.7, "chunk_tokens": 4}


@pytest.fixture
def whole() -> VocabularySlice:
    """The slice of the one rank of a group, which is not the default one: other tests of this process may have that."""
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    return VocabularySlice.of_rank(0, VOCABULARY, torch.tensor(BANNED), group)


def results(scores: TokenScores, hidden: Tensor, head: Tensor) -> list[Tensor]:
    """Scores and gradients."""
    ((OF_LOGPROBS * scores.logprobs_A).sum() + (OF_ENTROPIES * scores.entropies_A).sum()).backward()
    return [scores.logprobs_A, scores.entropies_A, scores.banned_mass_A, hidden.grad, head.grad]


@pytest.mark.parametrize("loss_gradients", [None, LossGradients(lambda *_: (OF_LOGPROBS, OF_ENTROPIES))])
def test_one_slice_is_the_whole_vocabulary(loss_gradients: LossGradients | None, whole: VocabularySlice) -> None:
    hidden, head, targets = inputs()
    scores = sharded_token_scores(hidden, head, targets, whole, **SETTINGS, loss_gradients=loss_gradients)
    found = results(scores, hidden, head)
    hidden, head, targets = inputs()
    expected = results(token_scores(hidden, head, targets, torch.tensor(BANNED), **SETTINGS), hidden, head)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=1e-4)


def test_banned_ids_are_those_of_the_slice(whole: VocabularySlice) -> None:
    banned = torch.tensor([0, 3, 4, 7, 8])
    slices = [VocabularySlice.of_rank(rank, 4, banned, whole.group).banned_K.tolist() for rank in range(3)]
    assert slices == [[0, 3], [0, 3], [0]]
