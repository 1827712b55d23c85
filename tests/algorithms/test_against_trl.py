"""Our losses beside those of TRL's GRPOTrainer: same tiny model, tokens, old log-probs and advantages.

TRL pads and runs transformers' own forward; we pack with shared prefixes. The prompts have one image, two, and none.
Not covered: how TRL makes advantages (its epsilon is another) and its corrections for vLLM.

Axes: `B` completions, `T` tokens of the longest, `A` actions packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from fovea.algorithms.aggregation import Aggregation
from fovea.algorithms.kl import k3
from fovea.algorithms.policy_loss import PolicyLoss, cispo_loss, clipped_loss, gspo_loss, sapo_loss
from fovea.algorithms.ratio import spread
from fovea.config.algorithm import Algorithm
from fovea.models.tiny import TinyParts
from fovea.models.vlm import VLM
from fovea.samples import make_batch
from fovea.train.packing import pack_row
from fovea.types import Group, Prompt
from fovea_gym.types import Score, Task
from tests.records import PROMPT, completion_of, one_turn
from tests.reference import gradients, largest_relative_difference, model_inputs
from tests.tiny_models import CPU, mixed_prompts, random_completions, tiny

FAMILY, TEMPERATURE, MAX_TOKENS = "qwen3_vl", 0.9, 12
LENGTHS = ((5, 1), (3, 9), (4, 7))
FLAT = [length for group in LENGTHS for length in group]
LOW, HIGH, BETA = 0.2, 0.28, 0.04
TRUNCATED = (1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A loss of ours, and the attributes of TRL's trainer that mean the same."""

    loss: Callable[[Tensor, Tensor, Tensor], PolicyLoss]
    mode: Aggregation
    loss_type: str
    trainer: dict[str, object] = field(default_factory=dict)
    delta: float | None = None
    truncated: tuple[int, ...] = ()
    """Completions that `mask_truncated` leaves out."""


CLIP = partial(clipped_loss, clip_low=LOW, clip_high=HIGH, dual_clip=None)


def gspo(lp: Tensor, old: Tensor, advantages: Tensor, dual_clip: float | None = None) -> PolicyLoss:
    return gspo_loss(lp, old, advantages, FLAT, clip_low=LOW, clip_high=HIGH, dual_clip=dual_clip)


CLIPPED = {"loss": CLIP, "mode": "token-mean", "loss_type": "dapo"}
MEANS = {"mode": "seq-mean-token-mean", "loss_type": "grpo"}
NORM = {"loss": CLIP, "mode": "seq-mean-token-sum-norm", "loss_type": "dr_grpo"}
SEQUENCES = {**MEANS, "trainer": {"importance_sampling_level": "sequence"}}
DUAL = partial(clipped_loss, clip_low=LOW, clip_high=HIGH, dual_clip=1.4)
SAPO = partial(sapo_loss, temperature_positive=1.0, temperature_negative=1.05)
CASES = {
    "dapo": Case(**CLIPPED),
    "grpo": Case(loss=CLIP, **MEANS),
    "dr_grpo": Case(**NORM),
    "kl": Case(**CLIPPED, trainer={"beta": BETA}),
    "dual_clip": Case(**{**CLIPPED, "loss": DUAL}, delta=1.4),  # TRL's name for it
    "gspo": Case(loss=gspo, **SEQUENCES),
    "gspo_dual_clip": Case(loss=partial(gspo, dual_clip=1.3), **SEQUENCES, delta=1.3),
    "dapo_masked": Case(**CLIPPED, truncated=TRUNCATED),
    "grpo_masked": Case(loss=CLIP, **MEANS, truncated=TRUNCATED),
    "dr_grpo_masked": Case(**NORM, truncated=TRUNCATED),
    "cispo": Case(
        loss=partial(cispo_loss, clip_low=1.0, clip_high=HIGH),
        mode="token-mean",
        loss_type="cispo",
        trainer={"epsilon_high": 1 + HIGH},  # here TRL's bound is that of the weight itself, and the only one
    ),
    "sapo": Case(loss=SAPO, mode="seq-mean-token-mean", loss_type="sapo"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Two copies of one model, and what both sides are given."""

    ours: VLM
    trainer: GRPOTrainer
    parts: TinyParts
    prompts: list[Prompt]
    completions: list[list[np.ndarray]]
    advantages_B: Tensor
    old_A: Tensor
    reference_A: Tensor

    def logprobs(self) -> Tensor:
        row = pack_row(self.parts.processor.family, self.prompts, self.completions, CPU)
        return self.ours(row, temperature=TEMPERATURE, chunk_tokens=10_000).logprobs_A


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    parts, other = tiny(FAMILY), tiny(FAMILY)
    prompts, completions = mixed_prompts(parts), random_completions(LENGTHS)
    # a seed with every branch in use, of tokens and of completions, the dual clip of a bad completion among them
    generator = torch.Generator().manual_seed(158)
    made = Setup(
        ours=VLM(parts.network, banned_ids=()),  # TRL bans none
        trainer=_trainer(other, tmp_path_factory.mktemp("trl")),
        parts=parts,
        prompts=prompts,
        completions=completions,
        advantages_B=torch.tensor([1.2, -0.7, 0.4, -1.5, -0.3, 0.9]),
        old_A=torch.randn(sum(FLAT), generator=generator) * 0.4,
        reference_A=torch.randn(sum(FLAT), generator=generator) * 0.4,
    )
    with torch.no_grad():
        logprobs_A = made.logprobs()
        made.old_A.add_(logprobs_A)
        made.reference_A.add_(logprobs_A)
    return made


def _trainer(parts: TinyParts, folder: Path) -> GRPOTrainer:
    parts.processor.tokenizer.padding_side = "left"
    settings = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=len(FLAT),
        num_generations=2,
        max_completion_length=MAX_TOKENS,
        temperature=TEMPERATURE,
        epsilon=LOW,
        epsilon_high=HIGH,
        use_bias_correction_kl=False,  # else TRL multiplies k3 with the ratio
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=parts.network,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "How many?"}] * 8),
        processing_class=parts.processor.tokenizer,
    )
    trainer.model.eval()  # one batch is all there is: nothing to accumulate
    return trainer


def padded(rows: Sequence[Tensor], *, left: bool) -> Tensor:
    longest = max(map(len, rows))
    sides = [(longest - len(row), 0) if left else (0, longest - len(row)) for row in rows]
    return torch.stack([torch.nn.functional.pad(row, side) for row, side in zip(rows, sides, strict=True)])


def trl_inputs(setup: Setup, truncated: Sequence[int]) -> dict[str, object]:
    """What TRL's trainer would have made of these completions; prompts are padded left, completions right.

    Its `mask_truncated_completions` takes the truncated ones out of mask and count.
    """
    pairs = [(p, ids) for p, group in zip(setup.prompts, setup.completions, strict=True) for ids in group]
    prompts = [torch.from_numpy(prompt.token_ids_L) for prompt, _ in pairs]
    completions = [torch.from_numpy(ids) for _, ids in pairs]
    models = [model_inputs(setup.parts, prompt, ids[:0]) for prompt, ids in pairs]
    images = [model for model in models if "pixel_values" in model]
    kinds = [m.get("mm_token_type_ids", torch.zeros(1, len(x)).int())[0] for m, x in zip(models, prompts, strict=True)]
    completion_ids = padded(completions, left=False)
    counted = [torch.full_like(ids, number not in truncated) for number, ids in enumerate(completions)]
    return {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([torch.ones_like(ids) for ids in prompts], left=True),
        "completion_ids": completion_ids,
        "completion_mask": padded(counted, left=False),
        "advantages": setup.advantages_B,
        "old_per_token_logps": padded(setup.old_A.split(FLAT), left=False),
        "ref_per_token_logps": padded(setup.reference_A.split(FLAT), left=False),
        "num_items_in_batch": sum(row.sum() for row in counted),
        "num_images": [len(prompt.images) for prompt, _ in pairs],
        **{name: torch.cat([model[name] for model in images]) for name in ("pixel_values", "image_grid_thw")},
        "mm_token_type_ids": torch.cat([padded(kinds, left=True), torch.zeros_like(completion_ids).int()], dim=1),
    }


def weights_of(case: Case) -> list[float]:
    """The weights that the samples of a step carry."""
    episodes = []
    for number, length in enumerate(FLAT):
        completion = completion_of(range(length), finish="length" if number in case.truncated else "stop")
        task = Task(id="0", question="q", answer="a")
        episodes.append(one_turn(task, completion, Score(reward=number, accuracy=0)))
    groups = [Group(prompt=PROMPT, episodes=tuple(episodes[start : start + 2])) for start in range(0, len(FLAT), 2)]
    algorithm = Algorithm(aggregation=case.mode, mask_truncated=bool(case.truncated))
    batch, _ = make_batch(groups, algorithm, max_new_tokens=MAX_TOKENS)
    return [sample.weight for sample in batch.samples]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name: str, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    case, trainer = CASES[name], setup.trainer
    for attribute, value in {"loss_type": case.loss_type, **case.trainer}.items():
        assert hasattr(trainer, attribute)
        monkeypatch.setattr(trainer, attribute, value)
    monkeypatch.setattr(trainer.args, "delta", case.delta)
    trainer.model.zero_grad()
    setup.ours.network.zero_grad()
    theirs = trainer._compute_loss(trainer.model, trl_inputs(setup, case.truncated))
    theirs.backward()

    logprobs_A = setup.logprobs()
    result = case.loss(logprobs_A, setup.old_A, spread(setup.advantages_B, FLAT))
    loss_A = result.loss_A
    if name == "kl":
        loss_A = loss_A + BETA * k3(logprobs_A, setup.reference_A)
    weights_B = torch.tensor(weights_of(case))
    ours = (loss_A * spread(weights_B, FLAT)).sum()
    ours.backward()

    if case.delta is not None:
        bounded_A = (result.ratio_A > case.delta) & (spread(setup.advantages_B, FLAT) < 0)
        assert bounded_A.any()
    if name not in ("cispo", "sapo"):  # with every branch of the clip in use
        assert result.clipped_low_A.any()
        assert result.clipped_high_A.any()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-5)
    first, second = gradients(setup.ours.network), gradients(trainer.model)
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5
    assert largest_relative_difference(first, second) < 1e-3
    assert max(float(gradient.norm()) for gradient in first.values()) > 1e-3
