"""Policy worker on torch: packed shared-prefix passes, gradient accumulation over micro-batches, AdamW.

With several ranks, each is called with the same batch, trains on its share of the groups and returns results combined
over all ranks. The model is entered through its root's `forward` only, and losses are normalised by counts of the whole
batch, so that sharding the weights changes neither this class nor the gradient.

Axes: `T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fovea.config.run import Algorithm, Train, Warmup
from fovea.errors import TrainError
from fovea.models.activation_tape import Tape
from fovea.models.policy_network import PolicyNetwork
from fovea.models.save import save_network
from fovea.models.trainable import (
    FrozenGuard,
    adapters_off,
    count_parameters,
    factored_weights,
    lora_layers,
    merged_weights,
    policy_parameters,
)
from fovea.samples import has_old_logprobs, with_old_logprobs, with_reference_logprobs, with_values
from fovea.train.base import ModelFacts, Needs, Pair
from fovea.train.packing import MicroBatch
from fovea.train.torch.activation_reuse import Reuse
from fovea.train.torch.backward import Backward
from fovea.train.torch.checkpoint import TRAINABLE, VALUE, load_counts, load_reference, save_counts, save_reference
from fovea.train.torch.critic import Critic
from fovea.train.torch.dropout import dropout_seed
from fovea.train.torch.forward import Scorer, in_batch_order
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.ranks import ALONE, Ranks
from fovea.train.torch.sft import SupervisedTrainer
from fovea.train.torch.sharding import copy_weights, full
from fovea.train.update_metrics import UpdateStats, mismatch
from fovea.types import Batch, Metrics, SampleGroup, Weights


class TorchPolicy:
    """PolicyWorker for one model, on one device or sharded over the devices of its ranks."""

    def __init__(  # noqa: PLR0913 (the models and the settings of a whole policy)
        self,
        vlm: PolicyNetwork,
        *,
        train: Train,
        algorithm: Algorithm,
        temperature: float,
        max_steps: int,
        reference: PolicyNetwork | None = None,
        critic: Critic | None = None,
        tape: Tape | None = None,
        warmup: Warmup | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`reference` is a frozen copy for the KL term; with LoRA it is None, and adapters are switched off instead.

        `tape` holds activations recorded by an engine in this process. `warmup` has the settings of `sft`. With several
        `ranks`, all these models have been sharded over them (`sharding.shard`).
        """
        self._vlm = vlm
        self._ranks = ranks
        assert tape is None or ranks.size == 1, "rollout activations of one process, but several ranks"
        self._tape = tape
        self._warmup = warmup
        self._sft: SupervisedTrainer | None = None
        self._train = train
        self._algorithm = algorithm
        self._critic = critic
        self._scorer = Scorer(vlm, train, temperature, self._ranks)
        self._reference = None if reference is None else Scorer(reference, train, temperature, self._ranks)
        self._reference_is_loaded_model = True
        self._backward = Backward(self._scorer, algorithm, critic, self._ranks)
        self._guards = [(model, FrozenGuard(model)) for model in self._models]
        self._optimizer = Optimizer(
            policy_parameters(vlm), train, peak_learning_rate=train.learning_rate, max_steps=max_steps
        )
        self._steps = 0
        self._skipped_in_a_row = 0
        self._engine_has_these_weights = False
        """True while the weights are those that `weights` returned last: rollout activations may be reused."""

    @property
    def vlm(self) -> PolicyNetwork:
        """The network under training; an engine in the same process samples with it."""
        return self._vlm

    def annotate(self, batch: Batch, needs: Needs) -> Batch:
        """Add old and reference log-probs and values; a value head on the policy's trunk gives both in one pass."""
        shared_trunk = self._critic is not None and self._critic.model is None
        if needs.values and shared_trunk:
            logprobs, values = self.logprobs_and_values(batch)
            batch = with_values(with_old_logprobs(batch, logprobs), values)
        elif needs.old_logprobs:
            batch = with_old_logprobs(batch, self.logprobs(batch))
        if needs.values and not shared_trunk:
            batch = with_values(batch, self.values(batch))
        if needs.reference_logprobs:
            batch = with_reference_logprobs(batch, self.reference_logprobs(batch))
        return batch

    def sft(self, pairs: Sequence[Pair]) -> Metrics:
        """Take one step of supervised fine-tuning. Its optimizer is freed by `snapshot_reference`."""
        assert self._warmup is not None, "supervised steps, but the policy was made without settings for them"
        if self._sft is None:
            self._sft = SupervisedTrainer(self._vlm, self._warmup, self._ranks)
        self._engine_has_these_weights = False
        return {"loss": self._sft.update(pairs)}

    def snapshot_reference(self) -> None:
        """Copy the present weights into master weights, reference and critic, and free the SFT optimizer."""
        self._sft = None
        self._engine_has_these_weights = False
        self._optimizer.sync_from_model()
        if self._critic is not None:
            self._critic.snapshot_reference(self._vlm)
        if self._reference is not None:
            copy_weights(dict(self._vlm.named_parameters()), dict(self._reference.vlm.named_parameters()))
            self._reference_is_loaded_model = False

    def logprobs(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Log-probs [T] of every sample under the current weights."""
        return self._scorer.logprobs(batch)

    def reference_logprobs(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Log-probs [T] of every sample under the reference: the weights from before RL."""
        if self._reference is not None:
            return self._reference.logprobs(batch)
        assert lora_layers(self._vlm), "no reference model was kept, and there are no adapters to switch off"
        with adapters_off(self._vlm):
            return self._scorer.logprobs(batch)

    @torch.no_grad()
    def logprobs_and_values(self, batch: Batch) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
        """Log-probs and values, [T] each, of every sample, from one pass of a policy with a value head."""
        logprobs: list[tuple[MicroBatch, Tensor]] = []
        values: list[tuple[MicroBatch, Tensor]] = []
        for micro in self._scorer.micro_batches(batch.groups):
            scores = self._scorer(micro.row)
            assert scores.values_A is not None, "values were requested, but the policy has no value head"
            logprobs.append((micro, scores.logprobs_A))
            values.append((micro, scores.values_A))
        return self._in_batch_order(logprobs, batch), self._in_batch_order(values, batch)

    @torch.no_grad()
    def values(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Values [T] of every sample, from a pass of a separate value model."""
        assert self._critic is not None, "values were requested, but there is no value function"
        model = self._critic.model
        assert model is not None, "the value head is on the policy's trunk; call logprobs_and_values"
        scored = [(micro, model(micro.row)) for micro in self._scorer.micro_batches(batch.groups)]
        return self._in_batch_order(scored, batch)

    def update(self, batch: Batch) -> Metrics:
        """Run `ppo_epochs` epochs of `minibatches` optimizer steps each; none if the batch has no groups.

        A minibatch with a non-finite loss or gradient ends the update without its step; TrainError when that happens in
        more than `max_skipped_updates` updates in a row.
        """
        rates, stats = self._set_rates(), UpdateStats()
        given = has_old_logprobs(batch)
        assert given or self._algorithm.minibatches == 1 or not batch.groups, "from the second step on it is off-policy"
        # groups that the update leaves out need log-probs for the comparison with the engine only
        left_out = self.logprobs(Batch(groups=batch.left_out)) if self._is_plain_step else None
        self._train_mode(True)
        with dropout_seed(self._steps, self._ranks, next(self._vlm.parameters()).device):
            for epoch in range(self._algorithm.ppo_epochs):
                went_through = self._epoch(epoch, batch, stats)
                if epoch == 0 and not given and stats.logprobs:
                    # computed before the only step so far, so these are the old log-probs of later epochs
                    batch = with_old_logprobs(batch, stats.logprobs)
                if not went_through:
                    break
        self._train_mode(False)
        self._steps += 1
        self._count_skipped(stats.not_finite)
        # linear outputs from the tape are the engine's own: comparing log-probs made of them would flatter the result
        measured = _mismatch(batch, left_out) if given or not stats.sums.get("reused_actions", 0) else {}
        always = {"updates_skipped": float(bool(stats.not_finite))} | rates | measured
        if not batch.groups:
            return {"loss": 0.0, "grad_norm": 0.0, "actions_trained": 0.0} | always
        activations_gib = max(self._ranks.gather(self._backward.activations.gib))
        return stats.metrics() | always | {"memory/activations_gib": activations_gib}

    def weights(self) -> Weights:
        """Current weights, adapters beside them; a weight without shards is the parameter, not a copy."""
        self._engine_has_these_weights = True
        return ((name, full(weight)) for name, weight in factored_weights(self._vlm.network))

    def save(self, folder: Path) -> None:
        """Write trainable parameters, optimizers and counters; TrainError if a frozen parameter has changed."""
        for model, guard in self._guards:
            self._ranks.run_on_each(partial(guard.check, model))
        self._optimizer.save(folder, TRAINABLE, self._ranks)
        if self._critic is not None:
            self._critic.optimizer.save(folder, VALUE, self._ranks)
        if self._reference is not None and not self._reference_is_loaded_model:
            save_reference(folder, self._reference.vlm, self._ranks)
        self._ranks.run_on_first(
            lambda: save_counts(folder, steps=self._steps, skipped_in_a_row=self._skipped_in_a_row)
        )

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote; TrainError when it belongs to another model."""
        self._engine_has_these_weights = False
        self._optimizer.load(folder, TRAINABLE)
        if self._critic is not None:
            self._critic.optimizer.load(folder, VALUE)
        self._steps, self._skipped_in_a_row = load_counts(folder, "steps", "skipped_in_a_row")
        if self._reference is not None:
            self._reference_is_loaded_model = not load_reference(folder, self._reference.vlm)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder: the present weights, adapters merged, and their config."""
        # every rank, since a full tensor is gathered from all
        weights = {name: full(weight) for name, weight in merged_weights(self._vlm.network)}
        self._ranks.run_on_first(lambda: save_network(self._vlm, folder, weights.items()))

    def describe(self) -> ModelFacts:
        """Device, parameter counts and number of ranks."""
        device = next(self._vlm.parameters()).device
        return ModelFacts(
            device=str(device),
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            parameters=tuple(count_parameters(self._vlm.network)),
            num_workers=self._ranks.size,
        )

    def close(self) -> None:
        """Do nothing: memory is freed with the last reference or with the process."""

    def _epoch(self, epoch: int, batch: Batch, stats: UpdateStats) -> bool:
        """Run one epoch, with an optimizer step after each minibatch; False if the update ends before the last one."""
        logprobs: list[tuple[MicroBatch, Tensor]] = []
        minibatches = _cut(self._in_order_of(epoch, batch.groups), self._algorithm.minibatches)
        stats.minibatches = len(minibatches)
        for groups in minibatches:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            done = self._backward(groups, self._reuse(groups), scale=len(batch.groups) / len(groups))
            stats.add(done.sums, done.policy_kl)
            stats.flops += len(self._models) * sum(self._scorer.cost.flops(group) for group in groups)
            limit = self._algorithm.max_policy_kl
            # before the step: the pass has measured the KL divergence of the weights as they are
            too_far = limit is not None and done.policy_kl > limit
            stats.not_finite = done.bad_tasks
            if stats.not_finite or too_far or not self._step(groups, stats):
                return False
            logprobs += done.logprobs
        # with several minibatches the log-probs are of different weights, and are no old log-probs
        if len(minibatches) == 1:
            stats.logprobs = self._in_batch_order(logprobs, batch)
        return True

    def _in_batch_order(self, scored: Iterable[tuple[MicroBatch, Tensor]], batch: Batch) -> list[NDArray[np.float32]]:
        return in_batch_order(scored, batch.groups, self._ranks)

    def _in_order_of(self, epoch: int, groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]:
        """The groups of a batch in order in the first epoch, and shuffled in later ones."""
        if epoch == 0 or self._algorithm.minibatches == 1:
            return groups
        # seeded by the counters alone, so that a resumed run shuffles like an uninterrupted one, and all ranks alike
        return [groups[index] for index in np.random.default_rng((self._steps, epoch)).permutation(len(groups))]

    def _step(self, groups: Sequence[SampleGroup], stats: UpdateStats) -> bool:
        """Take an optimizer step unless a gradient is non-finite; returns whether it was taken."""
        norms = [optimizer.clip() for optimizer in self._optimizers]
        if not np.isfinite(norms).all():
            stats.not_finite = self._tasks_of_bad_gradients(groups)
            return False
        stats.norms.append(norms)
        self._engine_has_these_weights = False
        # values near their initial 0 make poor advantages: the critic trains alone first
        waiting = self._critic is not None and self._steps < self._critic.warmup_steps
        for optimizer in self._optimizers[1:] if waiting else self._optimizers:
            optimizer.step()
        return True

    def _train_mode(self, mode: bool) -> None:
        self._vlm.train(mode)
        if self._critic is not None:
            self._critic.train(mode)

    @property
    def _models(self) -> list[nn.Module]:
        """Networks that run forward and backward over a batch: the policy, and the critic's separate model if any."""
        own = None if self._critic is None else self._critic.model
        return [self._vlm, *([] if own is None else [own])]

    @property
    def _optimizers(self) -> list[Optimizer]:
        """Optimizers of the policy and, if there is one, of the value function."""
        return [self._optimizer, *([] if self._critic is None else [self._critic.optimizer])]

    def _tasks_of_bad_gradients(self, groups: Sequence[SampleGroup]) -> list[str]:
        """Ids of tasks with a non-finite gradient despite a finite loss, by a backward pass over each group alone."""
        bad: list[str] = []
        for group in groups:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            self._backward([group], None, scale=1.0)
            if not np.isfinite([optimizer.clip() for optimizer in self._optimizers]).all():
                bad.append(group.task_id)
        return bad or [group.task_id for group in groups]

    def _count_skipped(self, not_finite: Sequence[str]) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if not_finite else 0
        limit = self._train.max_skipped_updates
        if self._skipped_in_a_row > limit:
            raise TrainError(
                f"a loss, a log-prob or a gradient is not finite at step {self._steps}, as in all of the last "
                f"{limit + 1} updates, with the samples of {', '.join(not_finite[:3])}; lower train.learning_rate (or "
                "algorithm.advantage.critic.learning_rate), which may change on resume, or look for non-finite "
                "values in the model and the rewards"
            )

    def _reuse(self, groups: Sequence[SampleGroup]) -> Reuse | None:
        """Rollout activations of these groups; None if the weights have changed since, or on a plain step."""
        if self._tape is None:
            return None
        if self._is_plain_step or not self._engine_has_these_weights:
            self._tape.free_graphs()
            return None
        return Reuse.of(groups, self._tape)

    @property
    def _is_plain_step(self) -> bool:
        """True on steps that reuse no activations, so that their log-probs can be compared with the engine's."""
        return self._steps % self._train.plain_update_every_steps == 0

    def _set_rates(self) -> Metrics:
        rates = [optimizer.set_rate(self._steps) for optimizer in self._optimizers]
        return dict(zip(("learning_rate", "learning_rate/value"), rates, strict=False))


def _mismatch(batch: Batch, left_out: Sequence[NDArray[np.float32]] | None) -> Metrics:
    """Engine-trainer mismatch of the trained groups, and of all groups if those left out have log-probs too."""
    old = [sample.old_logprobs_T for sample in batch.samples if sample.old_logprobs_T is not None]
    if len(old) != len(batch.samples):
        return {}
    trained = mismatch(batch.groups, old)
    whole = trained if not batch.left_out else {}
    if left_out:
        whole = mismatch((*batch.groups, *batch.left_out), [*old, *left_out])
    return whole | {f"{key}/trained": value for key, value in trained.items()}


def _cut(groups: Sequence[SampleGroup], parts: int) -> list[Sequence[SampleGroup]]:
    """Split groups into at most `parts` consecutive minibatches of nearly equal size, none of them empty."""
    bounds = np.linspace(0, len(groups), parts + 1).astype(int)
    return [groups[a:b] for a, b in pairwise(bounds) if b > a]
