"""Qwen3.5, dense and with experts, against transformers' own forward: delta nets and attention, prompts with images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from fovea.commands.exporting.export import export
from fovea.commands.targets import find_checkpoint, open_checkpoint
from fovea.models import delta_rule, experts
from fovea.models.decoder import decoder_shape
from fovea.models.plain import PlainVLM
from fovea.models.policy_network import PolicyNetwork
from fovea.models.tiny import TinyParts
from fovea.models.trainable import merged_weights
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from fovea.types import Prompt
from tests.records import text_prompt
from tests.reference import (
    OF_DECAY,
    gradients,
    largest_relative_difference,
    of_row,
    reference_entropy,
    reference_logprobs,
    reference_states,
    row_of,
    vlm_of,
)
from tests.runs import SMALL, train_here
from tests.tiny_models import CPU, image, random_completions, renderer, tiny, user, with_values

LAYERS = 6
"""Four delta nets before attention, one more between, and attention in the last layer."""
COUNTS = ((5, 1, 70), (3, 9), (4,), (2, 130))
"""Tokens of completions: fewer than the convolution's window, and more than one chunk of the delta rule."""
TEMPERATURE = 0.8
paths = pytest.mark.parametrize("path", [VLM, PlainVLM])
families = pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])


def prompts_of(parts: TinyParts) -> list[Prompt]:
    """One image, three images of odd sizes among text, none, and a single token."""
    odd = [image(3, 64, 97), image(4, 33, 50), image(5, 80, 40)]
    chats = [
        user(image(1), "How many circles?"),
        user("Compare ", odd[0], " with ", odd[1], " and ", odd[2], ": how many circles are there?"),
        user("What colour is the square?"),
    ]
    longest = list(map(renderer(parts).prompt, chats))
    return [*longest, text_prompt(longest[2].token_ids_L[:2])]


@pytest.fixture(params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Float64 also where the code asks for float32, as transformers' delta rule does; grouped products have none."""
    if request.param == "float64":
        for name in ("float", "float32"):
            monkeypatch.setattr(torch, name, torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        monkeypatch.setattr(experts.Experts, "run_grouped", experts.Experts.run_all)
    return torch.float32


@families
@paths
def test_scores_and_gradients_equal_transformers(path: type[PolicyNetwork], family: str, dtype: torch.dtype) -> None:
    """Of every parameter; the decay's in float64 only: its gradients are sums of far larger numbers of both signs."""
    parts, twin = tiny(family, num_layers=LAYERS), tiny(family, num_layers=LAYERS)
    prompts, completions = prompts_of(parts), random_completions(COUNTS)
    vlm = with_values(path, parts).to(dtype)
    twin.network.to(dtype)
    if dtype == torch.double:
        for network in (parts.network, twin.network):
            network.set_experts_implementation("eager")
    found = vlm(row_of(parts, COUNTS, prompts), temperature=TEMPERATURE, chunk_tokens=50)
    expected = [
        of_row(reference_logprobs, twin, prompts, completions, TEMPERATURE),
        of_row(reference_entropy, twin, prompts, completions, TEMPERATURE),
        of_row(reference_states, twin, prompts, completions) @ vlm.value_head.linear.weight[0].detach(),
    ]
    scores, is_double = [found.logprobs_A, found.entropies_A, found.values_A], dtype == torch.double
    for mine, other in zip(scores, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-9 if is_double else 2e-5, rtol=0)
    weight_A = torch.from_numpy(np.random.default_rng(0).normal(size=found.logprobs_A.shape)).to(dtype)
    for side in (scores, expected):
        sum(((weight_A * each).sum() for each in side), torch.zeros(())).backward()
    mine, other = gradients(vlm.network), gradients(twin.network)
    assert any(map(OF_DECAY.search, mine))
    assert largest_relative_difference(mine, other) < (1e-8 if is_double else 1e-5)


@families
def test_a_model_without_delta_nets_equals_transformers(family: str) -> None:
    """Its attention still has gates, and its norms weights that are stored minus 1."""
    parts = tiny(family, num_layers=1)
    prompts = prompts_of(parts)
    with torch.no_grad():
        vlm = vlm_of(tiny(family, num_layers=1))
        found = vlm(row_of(parts, COUNTS, prompts), temperature=1.0, chunk_tokens=50).logprobs_A
        expected = of_row(reference_logprobs, parts, prompts, random_completions(COUNTS))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@families
@paths
def test_a_row_changes_nothing_of_another(path: type[PolicyNetwork], family: str) -> None:
    """Other tokens in one completion, and in one prompt: all log-probs but theirs stay as they are, to the last bit."""
    parts = tiny(family, num_layers=LAYERS)
    vlm = path(parts.network, parts.processor.banned_ids)
    prompts, completions = prompts_of(parts), random_completions(COUNTS)

    def logprobs() -> list[np.ndarray]:
        with torch.no_grad():
            row = pack_row(vlm.family, prompts, completions, CPU)
            flat = vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A.numpy()
        return np.split(flat, np.cumsum([length for group in COUNTS for length in group])[:-1])

    before = logprobs()
    completions[0][2] = completions[0][2][::-1].copy()
    prompts[2] = replace(prompts[2], token_ids_L=prompts[2].token_ids_L[::-1].copy())
    same = [np.array_equal(first, second) for first, second in zip(before, logprobs(), strict=True)]
    assert same == [True, True, False, True, True, False, True, True]


@families
@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("shapes", ["algorithm.kl={name: loss, coef: 0.01}", "model.freeze_vision_tower=true"]),
        ("shapes_zoom", ["model.lora={rank: 4, parts: [language_model, vision_tower]}"]),
        ("shapes_ppo", ["train.gradient_checkpointing=selective"]),
    ],
    ids=["KL, frozen tower", "LoRA, two turns", "PPO, checkpointing"],
)
def test_it_trains_passes_the_parity_gate_and_is_exported(
    recipe: str, settings: list[str], family: str, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    rows = train_here(recipe, run, *SMALL, f"model.tiny.family={family}", "max_steps=3", *settings)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert json.loads((run / "parity.json").read_text())["passed"]
    assert export(run, out).max_logprob_difference < 1e-4
    exported = dict(AutoModelForImageTextToText.from_pretrained(out).named_parameters())
    trained = merged_weights(open_checkpoint(find_checkpoint(run)).vlm.network)
    assert all(torch.equal(exported[name], tensor) for name, tensor in trained)


def test_kernels_that_are_not_installed_are_named_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = decoder_shape(tiny("qwen3_5").network.config.get_text_config()).delta
    found = [lambda name: None, lambda name: None if name == "fla" else name, lambda name: name]
    notes = []
    monkeypatch.setattr(delta_rule, "delta_refusals", lambda *_: {})
    for each in found:
        monkeypatch.setattr(delta_rule, "find_spec", each)
        notes.append(delta_rule.slow_delta_note(shape, torch.device("cuda"), torch.bfloat16))
        assert delta_rule.slow_delta_note(shape, CPU, torch.bfloat16) is None
    missing = [note and note.rpartition("pip install ")[2] for note in notes]
    assert missing == ["flash-linear-attention causal-conv1d)", "flash-linear-attention)", None]
