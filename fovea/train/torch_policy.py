"""A policy on torch: packed shared-prefix passes, gradients summed over micro-batches, AdamW.

The model is entered through its root's `forward` only and every sum is divided by a count of the whole batch, so
that sharding the module over a mesh changes neither this class nor the gradient.

Axes: `A` actions of a micro-batch, `T` tokens of a completion.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.config import Algorithm, Train
from fovea.cutting import Cost, cut_by_cost, cut_by_count
from fovea.errors import TrainError
from fovea.models.parts import config_of, vision_tower
from fovea.models.trainable import (
    FrozenGuard,
    adapters_off,
    lora_layers,
    merged_weights,
    trainable_parameters,
)
from fovea.models.vlm import VLM
from fovea.models.work import training_passes, work_of
from fovea.packing import MicroBatch, micro_batches
from fovea.samples import has_old_logprobs, with_old_logprobs
from fovea.train.activations import ActivationMeter
from fovea.train.masters import MasterWeights
from fovea.train.objective import as_metrics, objective
from fovea.train.reuse import Reuse, forget_graphs
from fovea.train.schedule import learning_rate
from fovea.train.state import load_reference, load_state, save_reference, save_state
from fovea.types import Batch, Metrics, SampleGroup, Weights


class TorchPolicy:
    """One model on one device."""

    def __init__(
        self,
        vlm: VLM,
        *,
        train: Train,
        algorithm: Algorithm,
        temperature: float,
        max_steps: int,
        reference: VLM | None = None,
    ) -> None:
        """`reference`: a frozen copy for the KL term; with LoRA the adapters are switched off instead."""
        self._vlm = vlm
        self._train = train
        self._algorithm = algorithm
        self._temperature = temperature
        self._max_steps = max_steps
        self._reference = reference
        self._reference_is_loaded_model = True
        self._device = next(vlm.parameters()).device
        self._parameters = trainable_parameters(vlm)
        self._guard = FrozenGuard(vlm)
        self._cost = _cost_of(vlm)
        self._activations = ActivationMeter(vlm)
        self._masters = MasterWeights(self._parameters)
        self._optimizer = make_adamw(
            list(self._masters.by_name.values()), betas=train.betas, weight_decay=train.weight_decay
        )
        self._chunk_tokens = max(1, int(train.logits_mib * 2**20 / vlm.logits_bytes_per_token))
        self._steps = 0
        self._engine_has_these_weights = False
        """What a rollout computed may be used again: nothing has changed since `weights` were handed out."""

    def start_here(self) -> None:
        """Take the current weights for the start of RL: float32 copies and reference follow them."""
        self._engine_has_these_weights = False
        self._masters.read_again()
        if self._reference is not None:
            self._reference.load_state_dict(self._vlm.state_dict())
            self._reference_is_loaded_model = False

    def logprobs(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Log-probs [T] of every sample under the current weights."""
        return self._score(self._vlm, batch)

    def reference_logprobs(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Log-probs [T] of every sample under the weights that RL began with."""
        if self._reference is not None:
            return self._score(self._reference, batch)
        assert lora_layers(self._vlm), "no reference model was kept, and there are no adapters to switch off"
        with adapters_off(self._vlm):
            return self._score(self._vlm, batch)

    def update(self, batch: Batch) -> Metrics:
        """`epochs` passes in `minibatches` optimizer steps, none without groups; TrainError when not finite."""
        rate = self._set_learning_rate()
        sums: dict[str, float] = defaultdict(float)
        norms: list[float] = []
        self._vlm.train()
        for _ in range(self._train.epochs):
            logprobs: list[NDArray[np.float32]] = []
            for groups in _cut(batch.groups, self._train.minibatches):
                normalizer = batch.normalizer_tokens * len(groups) / len(batch.groups)
                norm, of_groups = self._optimizer_step(groups, normalizer, sums)
                norms.append(norm)
                logprobs += of_groups
            if self._train.minibatches == 1 and not has_old_logprobs(batch):
                # made before the only step so far: what later epochs call old
                batch = with_old_logprobs(batch, logprobs)
        self._vlm.eval()
        self._steps += 1
        if not norms:
            return {"loss": 0.0, "grad_norm": 0.0, "learning_rate": rate, "actions_trained": 0.0}
        metrics = as_metrics(sums, self._train.epochs * batch.normalizer_tokens)
        return metrics | {
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": rate,
            "memory/activations_gib": self._activations.gib,
        }

    def weights(self) -> Weights:
        """Current weights, adapters merged; a weight without an adapter is the parameter itself."""
        self._engine_has_these_weights = True
        return merged_weights(self._vlm.network)

    def save(self, folder: Path) -> None:
        """Trainable parameters, optimizer and step count; checks first that nothing frozen has moved."""
        self._guard.check(self._vlm)
        save_state(folder, self._masters.by_name, self._optimizer, self._steps)
        if self._reference is not None and not self._reference_is_loaded_model:
            save_reference(folder, self._reference)

    def load(self, folder: Path) -> None:
        self._engine_has_these_weights = False
        self._steps = load_state(folder, self._masters.by_name, self._optimizer)
        self._masters.write_back()
        if self._reference is not None:
            self._reference_is_loaded_model = not load_reference(folder, self._reference)

    def _optimizer_step(
        self, groups: Sequence[SampleGroup], normalizer: float, sums: dict[str, float]
    ) -> tuple[float, list[NDArray[np.float32]]]:
        """Gradient of these groups over all micro-batches, clipped; its norm before clipping, and the log-probs [T]."""
        self._optimizer.zero_grad(set_to_none=True)
        scored: list[tuple[MicroBatch, Tensor]] = []
        reuse = self._reuse(groups)
        for micro in self._micro_batches(groups):
            with self._activations(micro.row.num_tokens):
                scores = self._vlm(
                    micro.row if reuse is None else reuse.row(micro),
                    temperature=self._temperature,
                    chunk_tokens=self._chunk_tokens,
                )
                loss, micro_sums = objective(scores, micro, self._algorithm)
            (loss / normalizer).backward()
            scored.append((micro, scores.logprobs_A.detach()))
            for key, value in micro_sums.items():
                sums[key] += float(value)
        if reuse is not None:
            reuse.finish()
            sums["reused_actions"] += reuse.actions
            sums["reused_images"] += len(reuse.graph)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._train.max_grad_norm)
        if not bool(torch.isfinite(norm)):
            raise TrainError(
                f"the gradient norm is {float(norm)} at step {self._steps + 1}; lower train.learning_rate, or look for "
                "non-finite values in the model"
            )
        self._masters.take_gradients()
        self._engine_has_these_weights = False
        self._optimizer.step()
        self._masters.write_back()
        return float(norm), _in_batch_order(scored)

    def _reuse(self, groups: Sequence[SampleGroup]) -> Reuse | None:
        """What the rollout of these groups has left; None when that is stale, or this step is to be a plain one."""
        plain = self._steps % self._train.plain_update_every_steps == 0
        if plain or not self._engine_has_these_weights:
            forget_graphs(groups)
            return None
        return Reuse.of(groups)

    def _micro_batches(self, groups: Sequence[SampleGroup]) -> list[MicroBatch]:
        """The groups in packed rows; how they are cut changes no gradient."""
        train = self._train
        max_tokens = train.max_tokens_per_microbatch
        fixed_tokens = None if train.variable_seq_lengths else max_tokens
        if train.enable_dynamic_batch_size:
            rows = cut_by_cost(groups, self._cost, max_tokens)
        else:
            rows = cut_by_count(groups, train.groups_per_microbatch, fixed_tokens)
        return micro_batches(rows, self._device, fixed_tokens)

    @torch.no_grad()
    def _score(self, vlm: VLM, batch: Batch) -> list[NDArray[np.float32]]:
        micros = self._micro_batches(batch.groups)
        return _in_batch_order(
            (micro, vlm(micro.row, temperature=self._temperature, chunk_tokens=self._chunk_tokens).logprobs_A)
            for micro in micros
        )

    def _set_learning_rate(self) -> float:
        train = self._train
        rate = learning_rate(
            self._steps,
            peak=train.learning_rate,
            warmup_steps=train.lr_warmup_steps,
            total_steps=self._max_steps,
            shape=train.lr_schedule,
            final_frac=train.final_lr_frac,
        )
        set_learning_rate(self._optimizer, rate)
        return rate


def _cost_of(vlm: VLM) -> Cost:
    """A training pass of this model. The features of a frozen vision tower are taken to be cached."""
    trains_vision = any(parameter.requires_grad for parameter in vision_tower(vlm.network).parameters())
    passes = training_passes(lora=bool(lora_layers(vlm)), trains_vision=trains_vision, features_cached=True)
    return Cost(work=work_of(config_of(vlm.network)), passes=passes)


def _in_batch_order(scored: Iterable[tuple[MicroBatch, Tensor]]) -> list[NDArray[np.float32]]:
    """Log-probs [T] of each sample, whichever row it was in."""
    values: dict[int, Tensor] = {}
    for micro, logprobs_A in scored:
        values |= zip(micro.sample_numbers, logprobs_A.cpu().split(micro.lengths), strict=True)
    return [values[number].numpy() for number in range(len(values))]


def make_adamw(parameters: Sequence[Tensor], *, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101); the rate is set before every step."""
    return torch.optim.AdamW(parameters, lr=0.0, betas=betas, weight_decay=weight_decay, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _cut(groups: Sequence[SampleGroup], parts: int) -> list[Sequence[SampleGroup]]:
    """At most `parts` runs of groups, as even as can be; none is empty."""
    bounds = np.linspace(0, len(groups), parts + 1).astype(int)
    return [groups[a:b] for a, b in pairwise(bounds) if b > a]
