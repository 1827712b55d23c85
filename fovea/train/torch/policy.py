"""Policy worker on torch: packed shared-prefix passes, gradient accumulation over micro-batches, AdamW.

With several ranks, each is called with the same batch, trains on its share of the groups and returns results combined
over all ranks. The model is entered through its root's `forward` only, and losses are normalised by counts of the whole
batch, so that sharding the weights changes neither this class nor the gradient.

Axes: `T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fovea.config.algorithm import Algorithm
from fovea.config.sections import Train, Warmup
from fovea.errors import memory_for
from fovea.models.activation_tape import Tape
from fovea.models.decoder import imbalance
from fovea.models.load import save_network
from fovea.models.outgoing import OutgoingWeight, outgoing, outgoing_merged
from fovea.models.policy_network import PolicyNetwork
from fovea.models.trainable import (
    PROJECTOR,
    VISION_TOWER,
    FrozenGuard,
    count_parameters,
    merged_weights,
    part_of,
    policy_parameters,
)
from fovea.samples import has_old_logprobs
from fovea.train.base import ModelFacts, Needs, Pair
from fovea.train.microbatch_memory import MicrobatchLimit
from fovea.train.optimizer_steps import SkippedUpdates, are_scored, run_epochs, take_step
from fovea.train.pass_result import PassResult
from fovea.train.ranks import ALONE, Ranks
from fovea.train.row_assignment import ImagesByRank, Schedule
from fovea.train.torch.backward import Backward, Reuse
from fovea.train.torch.checkpoint import REFERENCE, TRAINABLE, VALUE, Saving, load_counts, load_reference
from fovea.train.torch.critic import Critic
from fovea.train.torch.forward import Annotator, Scorer, dropout_seed
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.sft import SupervisedTrainer
from fovea.train.torch.sharding import copy_weights, full
from fovea.train.update_metrics import UpdateStats, batch_mismatch
from fovea.types import Batch, Metrics, SampleGroup

FEWER_WEIGHTS = "train fewer weights (model.lora, model.freeze_vision_tower), or on more processes"


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
        self._limit = MicrobatchLimit(train, ranks)
        self._scorer = Scorer(vlm, train, temperature, self._ranks, self._limit)
        self._reference = None if reference is None else Scorer(reference, train, temperature, ranks, self._limit)
        self._reference_is_loaded_model = True
        self.annotator = Annotator(policy=self._scorer, reference=self._reference, critic=critic, ranks=ranks)
        self._backward = Backward(self._scorer, algorithm, critic, self._ranks)
        self._guards = [(model, FrozenGuard(model)) for model in self._models]
        self._optimizer = Optimizer(
            policy_parameters(vlm),
            train,
            peak_learning_rate=train.learning_rate,
            max_steps=max_steps,
            rate_ratios=_rate_ratios(vlm, train),
        )
        self._steps = 0
        self._skipped = SkippedUpdates(train.max_skipped_updates)
        self._saving = Saving(ranks)
        self._engine_has_these_weights = False
        """True while the weights are those that `outgoing` gave last: rollout activations may be reused."""

    @property
    def vlm(self) -> PolicyNetwork:
        """The network under training; an engine in the same process samples with it."""
        return self._vlm

    def annotate(self, batch: Batch, needs: Needs) -> Batch:
        """Add old and reference log-probs and values; a value head on the policy's trunk gives both in one pass."""

        def passes() -> Batch:
            return self.annotator.annotate(batch, needs)

        if needs.beside_engine:
            return self._limit.beside_engine(passes, batch.groups)
        return self._limit.fit(passes, batch.groups, self._scorer.deal.cost)

    @memory_for("a step of the warm-up", "lower warmup.batch_size")
    def sft(self, pairs: Sequence[Pair]) -> Metrics:
        """Take one step of supervised fine-tuning. Its optimizer is freed by `snapshot_reference`."""
        assert self._warmup is not None, "supervised steps, but the policy was made without settings for them"
        if self._sft is None:
            offload = self._train.backend.cpu_offload
            self._sft = SupervisedTrainer(self._vlm, self._warmup, self._ranks, cpu_offload=offload)
        self._limit.free_beside()  # a step of the warm-up does not begin again
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

    def update(self, batch: Batch) -> Metrics:
        """Run `ppo_epochs` epochs of `minibatches` optimizer steps each; none if the batch has no groups.

        A minibatch with a non-finite loss or gradient ends the update without its step; TrainError when that happens in
        more than `max_skipped_updates` updates in a row.
        """
        rates, stats = self._set_rates(), UpdateStats()
        one_step = self._algorithm.minibatches == 1 or not batch.groups
        assert one_step or has_old_logprobs(batch), "from the second step on it is off-policy"
        # groups that the update leaves out need log-probs for the comparison with the engine only
        left_out = self._logprobs_of_left_out(batch) if self._schedule.is_plain else None
        if batch.groups:
            self._make_moments()
        self._train_mode(True)
        self._vlm.expert_load.restart()
        with dropout_seed(self._steps, self._ranks, self._vlm.device):
            before = run_epochs(
                batch,
                stats,
                self._schedule,
                self._ranks,
                gradients=lambda groups, scale: self._gradients(groups, scale, stats),
                step=lambda groups: self._step(groups, stats),
            )
        self._train_mode(False)
        self._free_gradients()
        self._steps += 1
        self._skipped.count(stats.not_finite, self._steps)
        # linear outputs from the tape are the engine's own: comparing log-probs made of them would flatter the result
        own = are_scored(batch, self._algorithm) or not stats.sums.get("reused_actions", 0)
        measured = batch_mismatch(batch, before, left_out) if own else {}
        always = {"updates_skipped": float(bool(stats.not_finite))} | rates | measured
        always |= self._limit.metrics() | self._expert_metrics()
        if not batch.groups:
            return {"loss": 0.0, "grad_norm": 0.0, "actions_trained": 0.0} | always
        activations_gib = max(self._ranks.gather(self._backward.activations.gib))
        minibatches = self._schedule.minibatches(0, batch.groups)
        always |= {"memory/activations_gib": activations_gib} | self._scorer.balance(minibatches)
        return stats.metrics() | always

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's weights; shards of those that are trained are float32."""
        return self._vlm.dtype

    def outgoing(self) -> Iterable[OutgoingWeight]:
        """The weights for a push, adapters beside them."""
        self._engine_has_these_weights = True
        return outgoing(self._vlm.network)

    def outgoing_merged(self) -> Iterable[OutgoingWeight]:
        """The weights for a push to an engine that knows no adapters."""
        return outgoing_merged(self._vlm.network)

    def save(self, folder: Path) -> None:
        """Copy trainable parameters, optimizers and counters to host memory, and begin to write this rank's shards.

        TrainError if a frozen parameter has changed.
        """
        for model, guard in self._guards:
            self._ranks.run_on_each(partial(guard.check, model))
        tensors = self._optimizer.tensors(TRAINABLE)
        if self._critic is not None:
            tensors |= self._critic.optimizer.tensors(VALUE)
        if self._reference is not None and not self._reference_is_loaded_model:
            tensors[REFERENCE] = dict(self._reference.vlm.named_parameters())
        counts = {"steps": self._steps, "skipped_in_a_row": self._skipped.in_a_row}
        self._saving.begin(folder, tensors, counts)

    def finish_save(self) -> None:
        """Wait until the shards of `save` are on disk; an error of their writing is raised here."""
        self._saving.finish()

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote; TrainError when it belongs to another model."""
        self._engine_has_these_weights = False
        self._optimizer.load(folder, TRAINABLE)
        if self._critic is not None:
            self._critic.optimizer.load(folder, VALUE)
        self._steps, self._skipped.in_a_row = load_counts(folder, "steps", "skipped_in_a_row")
        if self._reference is not None:
            self._reference_is_loaded_model = not load_reference(folder, self._reference.vlm)

    def free_first(self, free_beside: Callable[[], bool]) -> None:
        """Set the function that frees memory before micro-batches become smaller (`MicrobatchLimit.free_beside`)."""
        self._limit.free_beside = free_beside

    def limit_microbatches(self, max_tokens: int) -> None:
        """Pack micro-batches of so many tokens at most, where that is less than the setting."""
        self._limit.lower(max_tokens)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder: the present weights, adapters merged, and their config."""
        weights: dict[str, Tensor] = {}
        for name, weight in merged_weights(self._vlm.network):
            # by every rank, since a full tensor is gathered from all; only the host of the first one holds all of them
            whole = full(weight, self._vlm.dtype)
            if self._ranks.is_first:
                weights[name] = whole.cpu()
        self._ranks.run_on_first(lambda: save_network(self._vlm, folder, weights.items()))

    def describe(self) -> ModelFacts:
        """Device, parameter counts and number of ranks."""
        device = self._vlm.device
        return ModelFacts(
            device=str(device),
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            parameters=tuple(count_parameters(self._vlm.network)),
            num_saved=sum(each.num_parameters for each in self._optimizers),
            num_workers=self._ranks.size,
        )

    def images_by_rank(self) -> ImagesByRank:
        """The images that each rank needs in the calls of the present step."""
        return ImagesByRank(
            policy=self._scorer.deal,
            reference=None if self._reference is None else self._reference.deal,
            schedule=self._schedule,
            limit_tokens=self._limit.max_tokens,
        )

    def close(self) -> None:
        """Do nothing: memory is freed with the last reference or with the process."""

    def _gradients(self, groups: Sequence[SampleGroup], scale: float, stats: UpdateStats) -> PassResult:
        """Accumulate the gradients of a minibatch in place of those of the one before."""
        stats.flops += len(self._models) * sum(self._scorer.deal.cost.flops(group) for group in groups)
        reuse = self._reuse(groups)

        def passes() -> PassResult:
            nonlocal reuse
            self._free_gradients()
            # a second try computes everything anew: the first may have used up the graph of the rollout
            recorded, reuse = reuse, None
            return self._backward(groups, recorded, scale)

        return self._limit.fit(passes, groups, self._scorer.deal.cost)

    def _logprobs_of_left_out(self, batch: Batch) -> list[NDArray[np.float32]]:
        left_out = Batch(groups=batch.left_out)
        return self._limit.fit(lambda: self.annotator.logprobs(left_out), left_out.groups, self._scorer.deal.cost)

    @memory_for("the moments of the optimizer", FEWER_WEIGHTS)
    def _make_moments(self) -> None:
        """Allocate all moments before the passes of the first update: a step that fails midway cannot begin again."""
        for optimizer in self._optimizers:
            self._limit.with_all_memory(optimizer.make_moments)

    @memory_for("the optimizer step", FEWER_WEIGHTS)
    def _step(self, groups: Sequence[SampleGroup], stats: UpdateStats) -> bool:
        """Take an optimizer step unless a gradient is non-finite; returns whether it was taken."""
        taken = take_step(
            self._optimizers,
            stats,
            # values near their initial 0 make poor advantages: only the critic trains at first
            critic_alone=self._critic is not None and self._steps < self._critic.warmup_steps,
            bad_tasks=lambda: self._tasks_of_bad_gradients(groups),
        )
        self._engine_has_these_weights &= not taken
        return taken

    def _free_gradients(self) -> None:
        """Free all gradients, for the rollout's memory and so that the next pass starts from zero."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

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
        """Ids of tasks with a non-finite gradient despite a finite loss, by a backward pass for each group."""
        bad: list[str] = []
        for group in groups:
            self._free_gradients()
            self._backward(groups, None, scale=1.0, only=group)
            if not np.isfinite([optimizer.clip() for optimizer in self._optimizers]).all():
                bad.append(group.task_id)
        return bad or [group.task_id for group in groups]

    def _reuse(self, groups: Sequence[SampleGroup]) -> Reuse | None:
        """Rollout activations of these groups; None if the weights have changed since, or on a plain step."""
        if self._tape is None:
            return None
        if self._schedule.is_plain or not self._engine_has_these_weights:
            self._tape.free_graphs()
            return None
        return Reuse.of(groups, self._tape)

    @property
    def _schedule(self) -> Schedule:
        return Schedule(
            algorithm=self._algorithm,
            plain_update_every_steps=self._train.plain_update_every_steps,
            step=self._steps,
        )

    def _expert_metrics(self) -> Metrics:
        value = imbalance(self._ranks.gather(self._vlm.expert_load.counts()))
        return {} if value is None else {"expert_imbalance": value}

    def _set_rates(self) -> Metrics:
        rates = [optimizer.set_rate(self._steps) for optimizer in self._optimizers]
        return dict(zip(("learning_rate", "learning_rate/value"), rates, strict=False))


def _rate_ratios(vlm: PolicyNetwork, train: Train) -> dict[str, float]:
    """Learning rates of the parameters that have one apart, relative to `train.learning_rate`."""
    apart = {VISION_TOWER: train.vision_tower_learning_rate, PROJECTOR: train.projector_learning_rate}
    # an adapter has the rate of the part that it is on
    paths = {name: name.removeprefix("network.").partition(".lora_")[0] for name in policy_parameters(vlm)}
    parts = {name: part_of(path, vlm.family) for name, path in paths.items()}
    return {name: rate / train.learning_rate for name, part in parts.items() if (rate := apart.get(part)) is not None}
