"""Policy worker on Megatron-core: GRPO, PPO and their variants on a model split over tensor, data and pipeline axes.

Every process is called with the same batch. Micro-batches are dealt to shares of the data axis as the torch backend
deals them to its ranks; the processes of one share run them together.

Axes: `T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.models.load import save_network
from fovea.models.outgoing import OutgoingWeight
from fovea.models.trainable import count_parameters, trainable_parameters
from fovea.samples import has_old_logprobs, with_old_logprobs, with_reference_logprobs, with_values
from fovea.train.base import ModelFacts, Needs, Pair
from fovea.train.megatron.checkpoint import HAS_REFERENCE, Checkpoints
from fovea.train.megatron.critic import Critic
from fovea.train.megatron.model import MegatronModel, adapters_off, copy_slices, skeleton
from fovea.train.megatron.optimizer import MegatronOptimizer
from fovea.train.megatron.parallel import take_place
from fovea.train.megatron.passes import Passes
from fovea.train.megatron.sft import SupervisedTrainer
from fovea.train.microbatch_memory import MicrobatchLimit
from fovea.train.objective import known_slopes
from fovea.train.optimizer_steps import SkippedUpdates, run_epochs, take_step
from fovea.train.pass_result import PassResult, measured_loss
from fovea.train.row_assignment import ImagesByRank, Schedule
from fovea.train.row_dealer import RowDealer, in_batch_order
from fovea.train.update_metrics import UpdateStats, batch_mismatch
from fovea.types import Batch, Metrics, SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """Results of a pass over a batch, an array [T] for each sample."""

    logprobs: list[NDArray[np.float32]]
    values: list[NDArray[np.float32]]
    """None at all without a value function."""


class MegatronPolicy:
    """PolicyWorker for one process of a Megatron model."""

    def __init__(self, config: Config, settings: Model, banned_ids: Sequence[int]) -> None:
        """Load `settings.path`, which all processes of the policy do together."""
        self._config = config
        self._train = train = config.train
        self._algorithm = config.algorithm
        self._shape = skeleton(settings, banned_ids, config.seed)
        self._place = place = take_place(config, self._shape.device)
        self._model = MegatronModel(config, settings, self._shape, place)
        self._training = self._model.for_training()
        self._optimizer = MegatronOptimizer(self._training, train, max_steps=config.max_steps, dtype=self._shape.dtype)
        self._chunk_tokens = chunk_tokens = max(
            1, int(train.backend.logits_mib * 2**20 / self._shape.logits_bytes_per_token)
        )
        temperature = config.rollout.temperature
        self._critic = self._make_critic()
        self._passes = Passes(
            self._model,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            training=self._training,
            value_head=None if self._critic is None else self._critic.head,
        )
        self._reference = None
        if config.copies_reference:
            frozen = MegatronModel(config, settings, self._shape, place)
            self._reference = Passes(frozen, temperature=temperature, chunk_tokens=chunk_tokens)
        self._limit = MicrobatchLimit(train, place.everyone)
        self._dealer = RowDealer(self._shape, train, place.dealt, self._limit, shards_tower=False)
        self._sft: SupervisedTrainer | None = None
        self._reference_is_loaded_model = True
        self._checkpoints = Checkpoints(self._training, self._optimizer, self._critic, place)
        self._steps = 0
        self._skipped = SkippedUpdates(train.max_skipped_updates)

    def _make_critic(self) -> Critic | None:
        settings = self._algorithm.critic
        if settings is None:
            return None
        width = self._shape.text_config.hidden_size
        return Critic(self._config, settings, self._place, width=width, device=self._model.device)

    def annotate(self, batch: Batch, needs: Needs) -> Batch:
        """Add the old and reference log-probs and values that are needed to the samples of a batch."""
        if needs.old_logprobs or needs.values:
            scores = self._scores(batch, self._passes, beside_engine=needs.beside_engine)
            if needs.values:
                batch = with_values(batch, scores.values)
            # the engine's, where they are the old ones, are there already
            batch = batch if has_old_logprobs(batch) else with_old_logprobs(batch, scores.logprobs)
        if needs.reference_logprobs:
            batch = with_reference_logprobs(batch, self._reference_logprobs(batch))
        return batch

    def _reference_logprobs(self, batch: Batch) -> list[NDArray[np.float32]]:
        if self._reference is not None:
            return self._scores(batch, self._reference).logprobs
        with adapters_off(self._model.module):
            return self._scores(batch, self._passes).logprobs

    def update(self, batch: Batch) -> Metrics:
        """Run `ppo_epochs` epochs of `minibatches` optimizer steps each; none if the batch has no groups.

        A minibatch with a non-finite loss or gradient ends the update without its step; TrainError when that happens in
        more than `max_skipped_updates` updates in a row.
        """
        always = self._set_rates()
        stats = UpdateStats()
        left_out = (
            self._scores(Batch(groups=batch.left_out), self._passes).logprobs if self._schedule.is_plain else None
        )
        self._passes.restart()
        self._training.train()
        before = run_epochs(
            batch,
            stats,
            self._schedule,
            self._place.results,
            gradients=lambda groups, scale: self._gradients(groups, scale, stats),
            step=lambda groups: self._step(groups, stats),
        )
        self._training.eval()
        self._steps += 1
        self._skipped.count(stats.not_finite, self._steps)
        always |= {"updates_skipped": float(bool(stats.not_finite))} | batch_mismatch(batch, before, left_out)
        always |= self._limit.metrics()
        if not batch.groups:
            return {"loss": 0.0, "grad_norm": 0.0, "actions_trained": 0.0} | always
        minibatches = self._schedule.minibatches(0, batch.groups)
        work = self._passes.work
        always |= {"padded_frac": 1 - work.tokens / max(work.packed_tokens, 1)} | self._dealer.balance(minibatches)
        return stats.metrics() | always

    def sft(self, pairs: Sequence[Pair]) -> Metrics:
        """Take one step of supervised fine-tuning. Its optimizer is freed by `snapshot_reference`."""
        if self._sft is None:
            passes = Passes(self._model, temperature=1.0, chunk_tokens=self._chunk_tokens, training=self._training)
            self._sft = SupervisedTrainer(self._config, self._shape, self._training, passes, self._place)
        self._limit.free_beside()  # a step of the warm-up does not begin again
        return {"loss": self._sft.update(pairs)}

    def snapshot_reference(self) -> None:
        """Copy the present weights into master weights and reference, and free the optimizer of the warm-up."""
        self._sft = None
        self._optimizer.sync_from_model()
        if self._reference is not None:
            copy_slices(self._model, self._reference.model)
            self._reference_is_loaded_model = False

    def outgoing(self) -> Iterable[OutgoingWeight]:
        """Every weight whole, for a push, adapters beside them; made by all processes together."""
        return self._model.outgoing()

    def outgoing_merged(self) -> Iterable[OutgoingWeight]:
        """As `outgoing`, for an engine that knows no adapters."""
        return self._model.outgoing_merged()

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's weights."""
        return self._shape.dtype

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and counters into an existing folder, each process its part."""
        counts = {"steps": self._steps, "skipped_in_a_row": self._skipped.in_a_row}
        reference = None if self._reference is None or self._reference_is_loaded_model else self._reference.model.chunk
        self._checkpoints.save(folder, counts, reference)

    def finish_save(self) -> None:
        """Return: `save` has written everything."""

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote, on any number of processes; TrainError where it is of another model."""
        reference = None if self._reference is None else self._reference.model.chunk
        counts = self._checkpoints.load(folder, reference)
        self._steps, self._skipped.in_a_row = counts["steps"], counts["skipped_in_a_row"]
        self._reference_is_loaded_model = not counts[HAS_REFERENCE]

    def free_first(self, free_beside: Callable[[], bool]) -> None:
        """Set the function that frees memory before micro-batches become smaller (`MicrobatchLimit.free_beside`)."""
        self._limit.free_beside = free_beside

    def limit_microbatches(self, max_tokens: int) -> None:
        """Pack micro-batches of so many tokens at most, where that is less than the setting."""
        self._limit.lower(max_tokens)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder: the present weights and their config."""
        everyone = self._place.everyone
        # by every process, since a whole tensor is gathered from all; only the host of the first one holds all of them
        merged = self._model.outgoing_merged()
        weights = {each.name: each.parameter.detach().cpu() for each in merged if everyone.is_first}
        everyone.run_on_first(lambda: save_network(self._shape, folder, weights.items()))

    def describe(self) -> ModelFacts:
        """Device, parameter counts of the whole model and number of processes."""
        device, network = self._model.device, self._shape.network
        return ModelFacts(
            device=str(device),
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            parameters=tuple(count_parameters(network)),
            num_saved=sum(parameter.numel() for parameter in trainable_parameters(network).values())
            + (0 if self._critic is None else self._critic.num_parameters),
            num_workers=self._place.everyone.size,
        )

    def images_by_rank(self) -> ImagesByRank:
        """The images that each share needs in the calls of the present step."""
        return ImagesByRank(
            policy=self._dealer.deal,
            reference=None if self._reference is None else self._dealer.deal,
            schedule=self._schedule,
            limit_tokens=self._limit.max_tokens,
            shares=self._place.shares,
        )

    def close(self) -> None:
        """Do nothing: memory is freed with the process."""

    def _gradients(self, groups: Sequence[SampleGroup], scale: float, stats: UpdateStats) -> PassResult:
        """Accumulate the gradients of a minibatch in place of those of the one before."""
        stats.flops += sum(self._dealer.deal.cost.flops(group) for group in groups)

        def passes() -> PassResult:
            self._optimizer.zero_grad()
            if self._critic is not None:
                self._critic.zero_grad()
            done = PassResult()
            self._passes.backward(
                self._dealer.micro_batches(groups),
                lambda micro, scores: measured_loss(scores, micro, self._algorithm, scale, done),
                lambda micro, times: known_slopes(micro, self._algorithm, times * scale),
            )
            done.read()
            done.agree(self._place.results)
            return done

        return self._limit.fit(passes, groups, self._dealer.deal.cost)

    def _step(self, groups: Sequence[SampleGroup], stats: UpdateStats) -> bool:
        """Take an optimizer step unless a gradient is non-finite; returns whether it was taken."""
        critic = self._critic
        return take_step(
            [self._optimizer] if critic is None else [self._optimizer, critic],
            stats,
            critic_alone=critic is not None and self._steps < critic.warmup_steps,
            bad_tasks=lambda: [group.task_id for group in groups],
        )

    def _set_rates(self) -> Metrics:
        rates = {"learning_rate": self._optimizer.set_rate(self._steps)}
        return rates if self._critic is None else rates | {"learning_rate/value": self._critic.set_rate(self._steps)}

    def _scores(self, batch: Batch, passes: Passes, *, beside_engine: bool = False) -> _Scores:
        """Log-probs and values of every sample, on all processes."""

        def score() -> _Scores:
            found = passes.scores(self._dealer.micro_batches(batch.groups))
            logprobs = [(micro, scores.logprobs_A) for micro, scores in found]
            values = [(micro, scores.values_A) for micro, scores in found if scores.values_A is not None]
            return _Scores(
                logprobs=in_batch_order(logprobs, batch.groups, self._place.results),
                values=in_batch_order(values, batch.groups, self._place.results) if passes.has_values else [],
            )

        if beside_engine:
            return self._limit.beside_engine(score, batch.groups)
        return self._limit.fit(score, batch.groups, self._dealer.deal.cost)

    @property
    def _schedule(self) -> Schedule:
        return Schedule(
            algorithm=self._algorithm,
            plain_update_every_steps=self._train.plain_update_every_steps,
            step=self._steps,
        )
