"""A policy on torch: packed shared-prefix passes, gradients summed over micro-batches, AdamW.

One rank or many: each is called with the same batch, trains on its share of the groups and returns what all have found.
The model is entered through its root's `forward` only and every sum is divided by a count of the whole batch, so that
sharding the weights changes neither this class nor the gradient.

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
from fovea.models.save import plain_network
from fovea.models.trainable import (
    FrozenGuard,
    adapters_off,
    count_parameters,
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
from fovea.train.torch.forward import Scorer, in_batch_order
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.ranks import ALONE, Ranks
from fovea.train.torch.sft import SupervisedTrainer
from fovea.train.torch.sharding import copy_weights, full
from fovea.train.update_metrics import Tally, mismatch
from fovea.types import Batch, Metrics, SampleGroup, Weights


class TorchPolicy:
    """One model, on one device or sharded over the devices of its ranks."""

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
        """`reference`: a frozen copy for the KL term; with LoRA the adapters are switched off instead.

        `tape`: the activations that an engine in this process keeps of its rollouts. `warmup`: how `sft` trains.
        `ranks`: over which all these models are sharded already (`sharding.shard`).
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
        """What a rollout computed may be used again: nothing has changed since `weights` were handed out."""

    @property
    def vlm(self) -> PolicyNetwork:
        """The network under training, for an engine in the same process to draw with."""
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
        """One step of supervised fine-tuning, by an optimizer that lives until `snapshot_reference`."""
        assert self._warmup is not None, "supervised steps, but the policy was made without settings for them"
        if self._sft is None:
            self._sft = SupervisedTrainer(self._vlm, self._warmup, self._ranks)
        self._engine_has_these_weights = False
        return {"loss": self._sft.update(pairs)}

    def snapshot_reference(self) -> None:
        """Begin RL with the present weights: master weights, reference and critic follow them."""
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
        """Log-probs [T] of every sample under the weights that RL began with."""
        if self._reference is not None:
            return self._reference.logprobs(batch)
        assert lora_layers(self._vlm), "no reference model was kept, and there are no adapters to switch off"
        with adapters_off(self._vlm):
            return self._scorer.logprobs(batch)

    @torch.no_grad()
    def logprobs_and_values(self, batch: Batch) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]:
        """Of every sample, each [T], from one pass of the policy with a value function on its trunk."""
        logprobs: list[tuple[MicroBatch, Tensor]] = []
        values: list[tuple[MicroBatch, Tensor]] = []
        for micro in self._scorer.micro_batches(batch.groups):
            scores = self._scorer(micro.row)
            assert scores.values_A is not None, "values are asked for, but the policy has no value head"
            logprobs.append((micro, scores.logprobs_A))
            values.append((micro, scores.values_A))
        return self._in_batch_order(logprobs, batch), self._in_batch_order(values, batch)

    @torch.no_grad()
    def values(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Of every sample, [T], from a pass of the value function's own model."""
        assert self._critic is not None, "values are asked for, but there is no value function"
        model = self._critic.model
        assert model is not None, "the value function is on the policy's trunk: `logprobs_and_values` asks it"
        scored = [(micro, model(micro.row)) for micro in self._scorer.micro_batches(batch.groups)]
        return self._in_batch_order(scored, batch)

    def update(self, batch: Batch) -> Metrics:
        """`ppo_epochs` passes in `minibatches` optimizer steps, none without groups.

        A minibatch with something that is not finite ends the update without its step; TrainError when that happens
        more than `max_skipped_updates` times in a row.
        """
        rates, tally = self._set_rates(), Tally()
        given = has_old_logprobs(batch)
        assert given or self._algorithm.minibatches == 1 or not batch.groups, "from the second step on it is off-policy"
        # what the update leaves out is scored for the comparison with the engine only
        left_out = self.logprobs(Batch(groups=batch.left_out)) if self._is_plain_step else None
        self._train_mode(True)
        for epoch in range(self._algorithm.ppo_epochs):
            went_through = self._epoch(epoch, batch, tally)
            if epoch == 0 and not given and tally.logprobs:
                # made before the only step so far: what later epochs call old
                batch = with_old_logprobs(batch, tally.logprobs)
            if not went_through:
                break
        self._train_mode(False)
        self._steps += 1
        self._count_skipped(tally.not_finite)
        # an update that looked its first pass up in the rollout's cannot say how far the two are from each other
        measured = _mismatch(batch, left_out) if given or not tally.sums.get("reused_actions", 0) else {}
        always = {"updates_skipped": float(bool(tally.not_finite))} | rates | measured
        if not batch.groups:
            return {"loss": 0.0, "grad_norm": 0.0, "actions_trained": 0.0} | always
        activations_gib = max(self._ranks.gather(self._backward.activations.gib))
        return tally.metrics() | always | {"memory/activations_gib": activations_gib}

    def weights(self) -> Weights:
        """Current weights, adapters merged; a weight without an adapter or shards is the parameter itself."""
        self._engine_has_these_weights = True
        return self._merged_weights()

    def _merged_weights(self) -> Weights:
        return ((name, full(weight)) for name, weight in merged_weights(self._vlm.network))

    def save(self, folder: Path) -> None:
        """Trainable parameters, optimizers and counts; checks first that nothing frozen has moved."""
        for model, guard in self._guards:
            self._ranks.each_does(partial(guard.check, model))
        self._optimizer.save(folder, TRAINABLE, self._ranks)
        if self._critic is not None:
            self._critic.optimizer.save(folder, VALUE, self._ranks)
        if self._reference is not None and not self._reference_is_loaded_model:
            save_reference(folder, self._reference.vlm, self._ranks)
        self._ranks.first_does(lambda: save_counts(folder, steps=self._steps, skipped_in_a_row=self._skipped_in_a_row))

    def load(self, folder: Path) -> None:
        self._engine_has_these_weights = False
        self._optimizer.load(folder, TRAINABLE)
        if self._critic is not None:
            self._critic.optimizer.load(folder, VALUE)
        self._steps, self._skipped_in_a_row = load_counts(folder, "steps", "skipped_in_a_row")
        if self._reference is not None:
            self._reference_is_loaded_model = not load_reference(folder, self._reference.vlm)

    def export(self, folder: Path) -> None:
        """Write the present weights, adapters merged, with their config as transformers reads them."""
        weights = dict(self._merged_weights())
        self._ranks.first_does(lambda: plain_network(self._vlm.network, weights.items()).save_pretrained(folder))

    def describe(self) -> ModelFacts:
        device = next(self._vlm.parameters()).device
        return ModelFacts(
            device=str(device),
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            parameters=tuple(count_parameters(self._vlm.network)),
            num_workers=self._ranks.size,
        )

    def close(self) -> None:
        """Nothing to do: the memory goes with the process or with the last reference."""

    def _epoch(self, epoch: int, batch: Batch, tally: Tally) -> bool:
        """One pass over the batch, an optimizer step after each minibatch; False where the update ends before that."""
        logprobs: list[tuple[MicroBatch, Tensor]] = []
        minibatches = _cut(self._in_order_of(epoch, batch.groups), self._algorithm.minibatches)
        tally.minibatches = len(minibatches)
        for groups in minibatches:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            done = self._backward(groups, self._reuse(groups), scale=len(batch.groups) / len(groups))
            tally.add(done.sums, done.policy_kl)
            tally.operations += len(self._models) * sum(self._scorer.cost.operations(group) for group in groups)
            limit = self._algorithm.max_policy_kl
            too_far = limit is not None and done.policy_kl > limit
            tally.not_finite = done.bad_tasks
            if tally.not_finite or too_far or not self._step(groups, tally):
                return False
            logprobs += done.logprobs
        if len(minibatches) == 1:
            tally.logprobs = self._in_batch_order(logprobs, batch)
        return True

    def _in_batch_order(self, scored: Iterable[tuple[MicroBatch, Tensor]], batch: Batch) -> list[NDArray[np.float32]]:
        return in_batch_order(scored, batch.groups, self._ranks)

    def _in_order_of(self, epoch: int, groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]:
        """The first epoch goes through the step as it came, later ones cut it into other minibatches."""
        if epoch == 0 or self._algorithm.minibatches == 1:
            return groups
        # of the counts alone, so that a resumed run cuts as one never stopped
        return [groups[index] for index in np.random.default_rng((self._steps, epoch)).permutation(len(groups))]

    def _step(self, groups: Sequence[SampleGroup], tally: Tally) -> bool:
        """The optimizer step after a pass, unless a gradient is not finite."""
        norms = [optimizer.clip() for optimizer in self._optimizers]
        if not np.isfinite(norms).all():
            tally.not_finite = self._tasks_of_bad_gradients(groups)
            return False
        tally.norms.append(norms)
        self._engine_has_these_weights = False
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
        """That go forward and backward over a batch: the policy, then a critic that has a model of its own."""
        own = None if self._critic is None else self._critic.model
        return [self._vlm, *([] if own is None else [own])]

    @property
    def _optimizers(self) -> list[Optimizer]:
        """The policy's, then that of the value function."""
        return [self._optimizer, *([] if self._critic is None else [self._critic.optimizer])]

    def _tasks_of_bad_gradients(self, groups: Sequence[SampleGroup]) -> list[str]:
        """Whose gradient is not finite although its loss is: each group once more, alone."""
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
                "algorithm.advantage.critic.learning_rate), or look for non-finite values in the model and the rewards"
            )

    def _reuse(self, groups: Sequence[SampleGroup]) -> Reuse | None:
        """What the rollout of these groups has left; None when that is stale, or this step is to be a plain one."""
        if self._tape is None:
            return None
        if self._is_plain_step or not self._engine_has_these_weights:
            self._tape.forget_graphs()
            return None
        return Reuse.of(groups, self._tape)

    @property
    def _is_plain_step(self) -> bool:
        """One that reuses nothing, and compares all of the step with the engine."""
        return self._steps % self._train.plain_update_every_steps == 0

    def _set_rates(self) -> Metrics:
        rates = [optimizer.set_rate(self._steps) for optimizer in self._optimizers]
        return dict(zip(("learning_rate", "learning_rate/value"), rates, strict=False))


def _mismatch(batch: Batch, left_out: Sequence[NDArray[np.float32]] | None) -> Metrics:
    """Of the groups trained on, and of the whole step where those left out have been scored or there are none."""
    old = [sample.old_logprobs_T for sample in batch.samples if sample.old_logprobs_T is not None]
    if len(old) != len(batch.samples):
        return {}
    trained = mismatch(batch.groups, old)
    whole = trained if not batch.left_out else {}
    if left_out:
        whole = mismatch((*batch.groups, *batch.left_out), [*old, *left_out])
    return whole | {f"{key}/trained": value for key, value in trained.items()}


def _cut(groups: Sequence[SampleGroup], parts: int) -> list[Sequence[SampleGroup]]:
    """At most `parts` runs of groups, as even as can be; none is empty."""
    bounds = np.linspace(0, len(groups), parts + 1).astype(int)
    return [groups[a:b] for a, b in pairwise(bounds) if b > a]
