"""The policy on torch: packed shared-prefix passes, AdamW on float32 master weights.

With several ranks, each is called with the same batch, trains on its share of the groups and returns results combined
over all ranks. The model is called only through its root's `forward`, and losses are normalised by counts of the whole
batch, so that sharding the weights changes neither this class nor the gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fovea.config.algorithm import Algorithm, Critic
from fovea.config.run import Config
from fovea.config.sections import Train, Warmup
from fovea.models.activation_tape import Tape
from fovea.models.decoder import imbalance
from fovea.models.policy_network import PolicyNetwork
from fovea.models.trainable import (
    PROJECTOR,
    VISION_TOWER,
    FrozenGuard,
    adapters_off,
    count_parameters,
    freeze_lm_head,
    lora_layers,
    merged_weights,
    part_of,
    policy_parameters,
    trainable_parameters,
    value_parameters,
)
from fovea.models.weights_to_sync import WeightToSync, merged_weights_to_sync, weights_to_sync
from fovea.train.adamw import AdamWSettings
from fovea.train.base import ModelFacts, SftExample
from fovea.train.loss import Measured, PassResult, value_model_loss
from fovea.train.microbatches import MicrobatchLimit
from fovea.train.ranks import ALONE, Ranks
from fovea.train.sft import SupervisedTrainer, cross_entropy, row_of_share
from fovea.train.torch.checkpoint import REFERENCE, TRAINABLE, VALUE, Saving, load_counts, load_reference
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.passes import Reuse, Scorer, ValueFunction, ValueModel, dropout_seed, policy_pass
from fovea.train.torch.sharding import copy_weights, full, shard, shards_tower, sum_over_replicas
from fovea.train.update import Scored, TrainedPolicy
from fovea.types import Batch, Metrics, SampleGroup
from fovea.utils.host_waits import awaited


def supervised_trainer(
    vlm: PolicyNetwork, settings: Warmup, ranks: Ranks = ALONE, *, cpu_offload: bool = False
) -> SupervisedTrainer:
    """A supervised trainer for the network; `cpu_offload` keeps master weights and moments in host memory."""

    def backward(pairs: Sequence[SftExample], step: int) -> float:
        vlm.train()
        # a rank without images must enter the same sharded modules as the others
        images = [image for pair in pairs for image in pair.prompt.images] if shards_tower(vlm) else []
        row = row_of_share(vlm, pairs, ranks, images)
        with dropout_seed(step, ranks, vlm.device):
            scores = vlm(row, temperature=1.0, chunk_tokens=max(row.num_actions, 1))
        loss = cross_entropy(scores.logprobs_A, pairs)
        # text rows have no graph if only the vision tower has adapters; this is the same on all ranks
        if loss.requires_grad:
            torch.autograd.backward(loss)
        vlm.eval()
        return float(awaited(loss.detach()))

    optimizer = Optimizer(trainable_parameters(vlm), AdamWSettings.of_warmup(settings), on_host=cpu_offload)
    return SupervisedTrainer(optimizer, backward, ranks=ranks, banned_ids=vlm.banned_ids)


class TorchPolicy(TrainedPolicy):
    """A policy of one model, on one device or sharded over the devices of its ranks."""

    def __init__(  # noqa: PLR0913 (the models and the settings of a whole policy)
        self,
        vlm: PolicyNetwork,
        *,
        train: Train,
        algorithm: Algorithm,
        temperature: float,
        max_steps: int,
        reference: PolicyNetwork | None = None,
        value_function: ValueFunction | None = None,
        tape: Tape | None = None,
        warmup: Warmup | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`reference` is a frozen copy for the KL term; with LoRA it is None, and adapters are switched off instead.

        `tape` holds activations recorded by an engine in this process. `warmup` has the settings of `sft`. With several
        `ranks`, all these models have been sharded over them (`sharding.shard`).
        """
        assert tape is None or ranks.size == 1, "rollout activations can be reused by a single rank only"
        limit = MicrobatchLimit(train, ranks)
        self._scorer = Scorer(vlm, train, temperature, ranks, limit)
        self._reference = None if reference is None else Scorer(reference, train, temperature, ranks, limit)
        super().__init__(
            vlm,
            train=train,
            algorithm=algorithm,
            warmup=warmup,
            batcher=self._scorer.batcher,
            reference_batcher=None if self._reference is None else self._reference.batcher,
            limit=limit,
            results=ranks,
            everyone=ranks,
        )
        self._tape = tape
        self.value_function = value_function
        """PPO's critic; None without one."""
        self._reference_is_loaded_model = True
        model = None if value_function is None else value_function.model
        self._models: list[nn.Module] = [vlm, *([] if model is None else [model])]
        """Networks that run forward and backward over a batch."""
        self._guards = [(each, FrozenGuard(each)) for each in self._models]
        self._optimizer = Optimizer(
            policy_parameters(vlm),
            AdamWSettings.of_run(train, max_steps=max_steps),
            on_host=train.backend.cpu_offload,
            rate_ratios=_rate_ratios(vlm, train),
        )
        self._saving = Saving(ranks)

    @property
    def vlm(self) -> PolicyNetwork:
        """The network under training; an engine in the same process samples with it."""
        return self._vlm

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [self._optimizer, *([] if self.value_function is None else [self.value_function.optimizer])]

    def _forward(self, batch: Batch) -> Scored:
        return self._scorer.score(batch)

    def _forward_reference(self, batch: Batch) -> Scored:
        if self._reference is not None:
            return self._reference.score(batch)
        assert lora_layers(self._vlm), "no reference model was kept, and there are no adapters to switch off"
        with adapters_off(self._vlm):
            return self._scorer.score(batch)

    @property
    def _value_model(self) -> nn.Module | None:
        return None if self.value_function is None else self.value_function.model

    @contextmanager
    def _update_mode(self) -> Iterator[None]:
        for model in self._models:
            model.train()  # this turns on gradient checkpointing and dropout
        self._vlm.expert_load.restart()
        with dropout_seed(self._steps, self._ranks, self._vlm.device):
            yield
        for model in self._models:
            model.eval()
        self._free_gradients()

    def _backward(self, groups: Sequence[SampleGroup], scale: float, only: SampleGroup | None = None) -> PassResult:
        # the search for a group with a bad gradient (`only`) runs after an update has used up the rollout's activations
        reuse = self._reuse(groups) if only is None else None
        micros, value_model, measured = self._batcher.micro_batches(groups, only), self._value_model, list[Measured]()
        for number, micro in enumerate(micros, start=1):
            is_last = number == len(micros)
            sum_over_replicas(self._vlm, now=is_last)
            row = micro.row if reuse is None else reuse.row(micro)
            measured.append(policy_pass(self._scorer, micro, row, self._algorithm, scale))
            if value_model is not None:
                # after the policy's backward pass, so that only one autograd graph is in memory at a time
                sum_over_replicas(value_model, now=is_last)
                loss, of_values = value_model_loss(value_model(micro.row), micro, self._algorithm, scale)
                loss.backward()
                measured.append(of_values)
        return PassResult.of(measured, self._ranks, {} if reuse is None else reuse.finish())

    def _reuse(self, groups: Sequence[SampleGroup]) -> Reuse | None:
        """Rollout activations of these groups; None if the weights have changed since, or on a plain step."""
        if self._tape is None:
            return None
        if self._schedule.is_plain or not self._tape.is_current:
            self._tape.free_graphs()
            return None
        return Reuse.of(groups, self._tape)

    def _tasks_of_bad_gradients(self, groups: Sequence[SampleGroup]) -> list[str]:
        """Find the tasks with a non-finite gradient despite a finite loss, by a backward pass for each group."""
        bad: list[str] = []
        for group in groups:
            self._free_gradients()
            self._backward(groups, 1.0, only=group)
            if not all(optimizer.clip().isfinite() for optimizer in self._optimizers):
                bad.append(group.task_id)
        return bad or [group.task_id for group in groups]

    def _weights_changed(self) -> None:
        if self._tape is not None:
            self._tape.is_current = False

    def _pass_metrics(self) -> Metrics:
        experts = imbalance(self._ranks.gather(self._vlm.expert_load.counts()))
        activations_gib = max(self._ranks.gather(self._scorer.activations.gib))
        return {"memory/activations_gib": activations_gib} | ({} if experts is None else {"expert_imbalance": experts})

    def _supervised_trainer(self, settings: Warmup) -> SupervisedTrainer:
        return supervised_trainer(self._vlm, settings, self._ranks, cpu_offload=self._train.backend.cpu_offload)

    def _merged_weights(self) -> Iterable[tuple[str, Tensor]]:
        return ((name, full(weight, self._vlm.dtype)) for name, weight in merged_weights(self._vlm.network))

    def snapshot_reference(self) -> None:
        """Copy the current weights into master weights, reference and value function, and free the SFT optimizer."""
        self._sft = None
        self._weights_changed()
        self._optimizer.masters.sync_from_model()
        if self.value_function is not None:
            self.value_function.snapshot_reference(self._vlm)
        if self._reference is not None:
            copy_weights(dict(self._vlm.named_parameters()), dict(self._reference.vlm.named_parameters()))
            self._reference_is_loaded_model = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's weights; shards of trained weights are float32."""
        return self._vlm.dtype

    def weights_to_sync(self) -> Iterable[WeightToSync]:
        """The weights for a sync, with adapters separate."""
        return weights_to_sync(self._vlm.network)

    def merged_weights_to_sync(self) -> Iterable[WeightToSync]:
        """The weights for a sync to an engine without support for adapters."""
        return merged_weights_to_sync(self._vlm.network)

    def save(self, folder: Path) -> None:
        """Copy trainable parameters, optimizers and counters to host memory, and begin to write this rank's shards.

        TrainError if a frozen parameter has changed.
        """
        for model, guard in self._guards:
            self._ranks.run_on_each(partial(guard.check, model))
        tensors = self._optimizer.tensors(TRAINABLE)
        if self.value_function is not None:
            tensors |= self.value_function.optimizer.tensors(VALUE)
        if self._reference is not None and not self._reference_is_loaded_model:
            tensors[REFERENCE] = dict(self._reference.vlm.named_parameters())
        self._saving.begin(folder, tensors, self._counts)

    def finish_save(self) -> None:
        """Wait until the shards of `save` are on disk; raises an error of the write."""
        self._saving.finish()

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote; TrainError if it belongs to another model."""
        self._weights_changed()
        self._optimizer.load(folder, TRAINABLE)
        if self.value_function is not None:
            self.value_function.optimizer.load(folder, VALUE)
        self._steps, self._skipped_in_a_row = load_counts(folder, "steps", "skipped_in_a_row")
        if self._reference is not None:
            self._reference_is_loaded_model = not load_reference(folder, self._reference.vlm)

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


def make_policy(config: Config, vlm: PolicyNetwork, tape: Tape | None = None, ranks: Ranks = ALONE) -> TorchPolicy:
    """Make the policy, sharded in place over `ranks`, with the reference model and value function it needs."""
    critic = config.algorithm.critic
    reference = copy.deepcopy(vlm).requires_grad_(False) if config.copies_reference else None
    value_model = None
    if critic is not None and critic.trunk == "separate":
        value_model = ValueModel(copy.deepcopy(vlm)).to(vlm.device)
        freeze_lm_head(value_model.trunk.network)
    # after the copies and before the optimizers, which keep references to the sharded parameters
    for model in (vlm, reference, value_model):
        if model is not None:
            shard(model, ranks, cpu_offload=config.train.backend.cpu_offload)
    return TorchPolicy(
        vlm,
        train=config.train,
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        max_steps=config.max_steps,
        reference=reference,
        value_function=None if critic is None else _make_value_function(config, critic, vlm, value_model),
        tape=tape,
        warmup=config.warmup,
        ranks=ranks,
    )


def _make_value_function(config: Config, critic: Critic, vlm: PolicyNetwork, model: ValueModel | None) -> ValueFunction:
    """Make the value function from the head that `make_vlm` put on the policy, or from a separate model."""
    parameters = value_parameters(vlm) if model is None else trainable_parameters(model)
    settings = AdamWSettings.of_critic(critic, config.train, max_steps=config.max_steps)
    optimizer = Optimizer(parameters, settings, on_host=config.train.backend.cpu_offload)
    return ValueFunction(optimizer=optimizer, model=model)


def _rate_ratios(vlm: PolicyNetwork, train: Train) -> dict[str, float]:
    """Learning rates of the parameters with a separate one, relative to `train.learning_rate`."""
    apart = {VISION_TOWER: train.vision_tower_learning_rate, PROJECTOR: train.projector_learning_rate}
    # an adapter has the rate of the part that it adapts
    paths = {name: name.removeprefix("network.").partition(".lora_")[0] for name in policy_parameters(vlm)}
    parts = {name: part_of(path, vlm.family) for name, path in paths.items()}
    return {name: rate / train.learning_rate for name, part in parts.items() if (rate := apart.get(part)) is not None}
