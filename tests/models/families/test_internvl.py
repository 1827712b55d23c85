"""InternVL against transformers' own processor and forward, by both paths, trained and exported."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, SuppressTokensLogitsProcessor

from fovea.commands.exporting.export import export
from fovea.config.algorithm import Algorithm
from fovea.config.model import Model
from fovea.config.run import Config
from fovea.errors import ConfigError, ModelError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.models.families.internvl import InternVL
from fovea.models.heads import ValueHead
from fovea.models.load import load_network
from fovea.models.plain import PlainVLM
from fovea.models.policy_network import PolicyNetwork
from fovea.models.processor import load_processor
from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.render import Renderer, images_of
from fovea.models.tiny import TinyParts
from fovea.models.vlm import VLM
from fovea.tools.families.tiny import KINDS, save_tiny_kind
from fovea.tools.plan.model_sizes import model_sizes
from fovea.train.base import Needs
from fovea.train.packing import pack_row
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Message, Prompt
from fovea.wiring.run import build
from tests.plain_runs import run_settings
from tests.policies import train_settings
from tests.reference import gradients, largest_relative_difference
from tests.rollout.drawing import generate, make_engine, plain_engine, same, seeded
from tests.rollout.two_turns import batch_of, drawn
from tests.tiny_models import CORPUS, CPU, from_array, image, random_completions, user

pytestmark = pytest.mark.skipif(
    hasattr(AutoImageProcessor, "_backends"), reason="AutoImageProcessor of this transformers asks for torchvision"
)

CHATS = [
    user("How many circles are there?"),
    user(image(1), "How many circles are there?"),
    user("Compare \n\n", image(2, 70, 40), " with ", image(3, 33, 90), image(4, 48, 48), "\nnow."),
]
COUNTS = [(5, 3), (4,), (2, 6)]
TOLERANCE, TEMPERATURE = 2e-5, 0.8
MakePolicyNetwork = Callable[..., PolicyNetwork]
paths = pytest.mark.parametrize("path", [VLM, PlainVLM])


class Loaded(TinyParts):
    """A tiny model with its renderer, and the inputs that transformers' processor makes."""

    @classmethod
    def of(cls, folder: Path) -> Loaded:
        settings = Model(path=str(folder))
        return cls(network=load_network(settings), processor=load_processor(settings))

    @property
    def prompts(self) -> list[Prompt]:
        renderer = Renderer(self.processor, from_array)
        return [renderer.prompt(chat) for chat in CHATS]

    def inputs(self, chat: list[Message]) -> dict[str, Any]:
        text = Renderer(self.processor, from_array).text(chat)
        return dict(self.processor.image_processor.inputs(text, [from_array(ref) for ref in images_of(chat)]))

    def scores(self, chat: list[Message], completion: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies [T] and last states [T, width] by transformers' forward on its processor's pixels."""
        given = {name: torch.as_tensor(x) for name, x in self.inputs(chat).items()}
        ids = torch.cat([given.pop("input_ids"), torch.from_numpy(completion)[None]], dim=1)
        given["attention_mask"] = torch.ones_like(ids)
        out = self.network(input_ids=ids, **given, use_cache=False, output_hidden_states=True)
        place = slice(-len(completion) - 1, -1)
        suppress = SuppressTokensLogitsProcessor(self.processor.banned_ids)
        logprobs = suppress(ids, out.logits[0, place] / TEMPERATURE).log_softmax(-1)  # type: ignore[arg-type]
        entropy = torch.distributions.Categorical(logits=logprobs[:, ~logprobs[0].isinf()]).entropy()
        picked = logprobs.gather(1, torch.from_numpy(completion)[:, None])[:, 0]
        return picked, entropy, out.hidden_states[-1][0, place]


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}
"""Rotary positions of InternVL 3."""


@pytest.fixture(
    scope="module",
    params=[{"model_type": "qwen2", "rope_parameters": DYNAMIC}, {"model_type": "qwen3"}],
    ids=["3", "3.5"],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "internvl", replace(KINDS["internvl"], text=request.param))
        return save_tiny_kind("internvl", tmp_path_factory.mktemp("internvl"), CORPUS)


def with_values(path: MakePolicyNetwork, parts: TinyParts) -> PolicyNetwork:
    head = ValueHead(64, detach_trunk=False)
    with torch.no_grad():
        head.linear.weight.copy_(torch.linspace(-0.1, 0.1, 64)[None])
    return path(parts.network, parts.processor.banned_ids, value_head=head)


def test_prompts_equal_transformers_processor(folder: Path) -> None:
    loaded = Loaded.of(folder)
    assert isinstance(loaded.processor.family, InternVL)
    for chat, prompt in zip(CHATS, loaded.prompts, strict=True):
        expected = loaded.inputs(chat)
        assert prompt.token_ids_L.tolist() == expected["input_ids"][0].tolist()
        inputs = loaded.processor.family.forward_inputs(torch.from_numpy(prompt.token_ids_L)[None], prompt.images)
        assert inputs.keys() == expected.keys() - {"input_ids", "attention_mask"}
        for name, tensor in inputs.items():
            np.testing.assert_array_equal(tensor.numpy(), expected[name])
    assert len(inputs["pixel_values"]) > len(prompt.images), "no image is cut into tiles"


@paths
def test_scores_and_gradients_equal_transformers(path: MakePolicyNetwork, folder: Path) -> None:
    parts, twin = Loaded.of(folder), Loaded.of(folder)
    vlm, completions = with_values(path, parts), random_completions(COUNTS)
    row = pack_row(vlm.family, parts.prompts, completions, CPU)
    found = vlm(row, temperature=TEMPERATURE, chunk_tokens=5)
    of_twin = [twin.scores(chat, x) for chat, group in zip(CHATS, completions, strict=True) for x in group]
    logprobs, entropies, states = (torch.cat(each) for each in zip(*of_twin, strict=True))
    assert found.values_A is not None
    assert vlm.value_head is not None
    values = states @ vlm.value_head.linear.weight[0].detach()
    pairs = [(found.logprobs_A, logprobs), (found.entropies_A, entropies), (found.values_A, values)]
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, atol=TOLERANCE, rtol=0)
    weight_A = torch.from_numpy(np.random.default_rng(0).normal(size=logprobs.shape)).float()
    for side in (0, 1):
        sum(((weight_A * pair[side]).sum() for pair in pairs), torch.zeros(())).backward()
    both = [gradients(each.network) for each in (parts, twin)]
    total = torch.stack([x.norm() for x in both[0].values()]).norm()
    # the bias of a key moves no softmax: its gradient is rounding
    moving = {name for name, x in both[1].items() if x.norm() > 1e-6 * total}
    assert {name.split(".")[1] for name in moving} == {"vision_tower", "multi_modal_projector", "language_model"}
    assert largest_relative_difference(*({name: each[name] for name in moving} for each in both)) < 1e-5


def test_rotary_positions_never_wait_for_a_gpu(folder: Path) -> None:
    """On the meta device, whose tensors have no values to wait for."""
    parts = Loaded.of(folder)
    rope = VLM(parts.network, parts.processor.banned_ids).text_rope(
        torch.arange(4, device="meta"), torch.empty(4, 64, device="meta")
    )
    assert rope.cos_ND.shape == (4, 32)


@paths
def test_no_row_moves_another(path: MakePolicyNetwork, folder: Path) -> None:
    parts = Loaded.of(folder)
    vlm, prompts = path(parts.network, parts.processor.banned_ids), parts.prompts

    def logprobs(completions: Sequence[Sequence[np.ndarray]]) -> Tensor:
        with torch.no_grad():
            return vlm(pack_row(vlm.family, prompts, completions, CPU), temperature=1.0, chunk_tokens=100).logprobs_A

    completions = random_completions(COUNTS)
    found = logprobs(completions)
    completions[1][0] = completions[1][0][::-1].copy()
    again = logprobs(completions)
    assert torch.equal(again[:8], found[:8])
    assert torch.equal(again[12:], found[12:])
    assert not torch.equal(again[8:12], found[8:12])


@pytest.mark.parametrize("how", ["full", "selective"])
def test_gradient_checkpointing_changes_nothing(how: Recompute, folder: Path) -> None:
    parts = Loaded.of(folder)
    vlm = VLM(parts.network, parts.processor.banned_ids).train()
    row = pack_row(vlm.family, parts.prompts, random_completions(COUNTS), CPU)
    results, estimates = [], []
    for recompute in ("none", how):
        recompute_activations(parts.network, recompute)
        vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A.sum().backward()
        results.append(gradients(vlm))
        estimates.append(vlm.graph_bytes(row.images))
    assert largest_relative_difference(*results) < 1e-6
    assert 0 < estimates[1] < estimates[0]
    parts.network.requires_grad_(False)
    assert vlm.graph_bytes(row.images) < estimates[1]


def test_both_engines_draw_the_same_and_the_trainer_scores_it(folder: Path) -> None:
    fast, plain = Loaded.of(folder), Loaded.of(folder)
    prompts, samplings = fast.prompts[::-1], seeded(3, max_new_tokens=12)
    groups = generate(make_engine(fast), prompts, samplings, n=3)
    twins = generate(plain_engine(plain), prompts, samplings, n=3)
    assert all(same(a, b) for a, b in zip(groups, twins, strict=True))
    vlm = VLM(fast.network, fast.processor.banned_ids)
    row = pack_row(vlm.family, prompts, [[each.token_ids_T for each in group] for group in groups], CPU)
    with torch.no_grad():
        scored = vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A
    engines = np.concatenate([each.logprobs_T for group in groups for each in group])
    np.testing.assert_allclose(scored.numpy(), engines, atol=TOLERANCE)


def test_an_image_of_a_second_turn_is_drawn_and_scored_as_on_the_plain_path(folder: Path) -> None:
    fast, plain = Loaded.of(folder), Loaded.of(folder)
    groups, twins = drawn(fast, make_engine(fast)), drawn(plain, plain_engine(plain))  # type: ignore[arg-type]
    for one, other in zip(groups, twins, strict=True):
        for first, second in zip(one.episodes, other.episodes, strict=True):
            for a, b in zip(first.tokens, second.tokens, strict=True):
                np.testing.assert_array_equal(a.completion.token_ids_T, b.completion.token_ids_T)
    batch, scored = batch_of(groups), []
    for model in (VLM(fast.network, fast.processor.banned_ids), PlainVLM(plain.network, plain.processor.banned_ids)):
        policy = TorchPolicy(model, train=train_settings(), algorithm=Algorithm(), temperature=0.9, max_steps=10)
        scored.append(policy.annotate(batch, Needs(old_logprobs=True)))
    for one, other in zip(scored[0].samples, scored[1].samples, strict=True):
        assert one.old_logprobs_T is not None
        assert len(one.images) > 1
        np.testing.assert_allclose(one.old_logprobs_T, other.old_logprobs_T, atol=TOLERANCE)


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm.kl": {"coef": 0.01}},
        {"model.lora.rank": 4, "train.gradient_checkpointing": "selective"},
        {"algorithm.name": "ppo", "model.freeze_vision_tower": True, "model.dtype": "bfloat16"},
    ],
    ids=["grpo", "lora", "ppo"],
)
def test_it_trains_passes_the_parity_gate_and_is_exported(settings: dict[str, object], tmp_path: Path) -> None:
    model, run = save_tiny_kind("internvl", tmp_path / "model", CORPUS), tmp_path / "run"
    train(build(run_settings(run, model, **settings)))
    metrics = read_metrics(run)
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(row["grad_norm"] > 0 for row in metrics)
    assert json.loads((run / "parity.json").read_text())["passed"]
    limit = 0.3 if "model.dtype" in settings else 1e-4
    assert export(run, tmp_path / "out").max_logprob_difference < limit
    before, after = Loaded.of(model), Loaded.of(tmp_path / "out")
    base = before.network.to(torch.bfloat16 if "model.dtype" in settings else torch.float32)
    trained = dict(after.network.named_parameters())
    moved = {name.split(".")[1] for name, x in base.named_parameters() if not torch.equal(trained[name], x.float())}
    assert ("vision_tower" in moved) is ("algorithm.kl" in settings)
    assert ("multi_modal_projector" in moved) is ("algorithm.kl" in settings)
    assert "language_model" in moved
    assert before.inputs(CHATS[2])["pixel_values"].shape == after.inputs(CHATS[2])["pixel_values"].shape


@pytest.mark.parametrize("size", [(20, 20), (48, 130), (300, 40), (97, 64)])
def test_the_count_by_size_is_that_of_the_prompt(size: tuple[int, int], folder: Path) -> None:
    renderer = Renderer(Loaded.of(folder).processor, from_array)
    chat = user(image(1, *size), "How many?")
    assert renderer.fewest_tokens(chat) == renderer.prompt(chat).images[0].num_tokens


def test_flops_of_the_linear_layers_are_those_of_their_weights(folder: Path) -> None:
    """Two per weight and patch in the tower, and per visual token in the projector, without norms and positions."""
    parts = Loaded.of(folder)
    model, vision = parts.network.base_model, parts.network.config.vision_config
    of_tower = sum(x.numel() for x in model.vision_tower.parameters() if x.ndim in (2, 4))
    of_projector = sum(x.numel() for x in model.multi_modal_projector.parameters() if x.ndim == 2)
    work = parts.processor.family.work
    # a visual token is 2 x 2 patches
    assert work.patch == 2 * (of_tower + of_projector / 4)
    assert work.image_pair == 4 * vision.hidden_size * vision.num_hidden_layers


def test_what_the_family_does_not_know_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"InternVL makes tiles of one size of every image; leave them out"):
        build(run_settings(tmp_path / "run", folder, **{"model.max_pixels": 1000}))
    with pytest.raises(ConfigError, match=r"is a internvl, and `fovea plan` knows the memory of Qwen-VL's .* only"):
        model_sizes(Config.model_validate({"model": {"path": str(folder)}}))


def test_another_decoder_runs_as_transformers_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "internvl", replace(KINDS["internvl"], text={"model_type": "llama"}))
    other = save_tiny_kind("internvl", tmp_path, CORPUS)
    assert AutoConfig.from_pretrained(other).text_config.model_type == "llama"
    with pytest.raises(ModelError, match=r"model_type is internvl, .*; set model\.family=auto"):
        load_processor(Model(path=str(other)))
    assert load_processor(Model(path=str(other), family="auto")).family.fast_path is None
