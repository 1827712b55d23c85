"""Policy worker on Megatron-core: GRPO, PPO and their variants on a model split over tensor, data and pipeline axes.

Every process is called with the same batch. Micro-batches are assigned to shares of the data axis as the torch backend
assigns them to its ranks; the processes of one share run them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import Tensor

from fovea.config.backends import MegatronBackend
from fovea.config.model import Model
from fovea.config.run import Config
from fovea.config.sections import Warmup
from fovea.models.token_logprobs import TokenScores
from fovea.models.trainable import count_parameters, trainable_parameters
from fovea.models.weights_to_sync import WeightToSync
from fovea.train.adamw import AdamWSettings
from fovea.train.base import ModelFacts, PolicyOptimizer, SftExample
from fovea.train.loss import PassResult
from fovea.train.megatron.checkpoint import HAS_REFERENCE, MegatronCheckpoints, load_weights
from fovea.train.megatron.critic import ReplicatedValueHead
from fovea.train.megatron.model import MegatronModel, adapters_off, copy_slices, skeleton
from fovea.train.megatron.optimizer import MegatronOptimizer
from fovea.train.megatron.parallel import ParallelRank
from fovea.train.megatron.passes import MegatronPasses
from fovea.train.microbatches import MicroBatcher, MicrobatchLimit
from fovea.train.sft import SupervisedTrainer, cross_entropy, row_of_share
from fovea.train.update import Scored, TrainedPolicy
from fovea.types import Batch, Metrics, SampleGroup


def supervised_trainer(passes: MegatronPasses, settings: Warmup, *, offload: bool) -> SupervisedTrainer:
    """A supervised trainer for the model of `passes`, whose temperature is 1; `offload` as in `MegatronOptimizer`."""
    model, training = passes.model, passes.training
    assert training is not None, "supervised steps of a model that is not trained"

    def backward(pairs: Sequence[SftExample], _step: int) -> float:
        parts: list[Tensor] = []

        def loss(scores: TokenScores) -> Tensor:
            part = cross_entropy(scores.logprobs_A, pairs)
            parts.append(part.detach())
            return part

        training.train()
        passes.backward_of_row(row_of_share(model.shape, pairs, model.place.data), loss)
        training.eval()
        # stages before the last one compute no loss
        return float(torch.stack(parts).sum()) if parts else 0.0

    optimizer = MegatronOptimizer(training, AdamWSettings.of_warmup(settings), dtype=model.shape.dtype, offload=offload)
    return SupervisedTrainer(optimizer, backward, ranks=model.place.results, banned_ids=model.shape.banned_ids)


class MegatronPolicy(TrainedPolicy):
    """One process of a policy on Megatron."""

    def __init__(self, config: Config, settings: Model, banned_ids: Sequence[int]) -> None:
        """Load `settings.path`; all processes of the policy must call this together."""
        train, shape = config.train, skeleton(settings, banned_ids, config.seed)
        self._place = place = ParallelRank.setup(config, shape.device)
        limit = MicrobatchLimit(train, place.everyone)
        batcher = MicroBatcher(shape, train, place.data, limit, shards_tower=False)
        super().__init__(
            shape,
            train=train,
            algorithm=config.algorithm,
            warmup=config.warmup,
            batcher=batcher,
            reference_batcher=batcher if config.copies_reference else None,
            limit=limit,
            results=place.results,
            everyone=place.everyone,
        )
        assert isinstance(train.backend, MegatronBackend)
        self._offload = train.backend.optimizer_offload
        self._model = MegatronModel(config, settings, shape, place)
        self._training = self._model.for_training()
        self._optimizer = MegatronOptimizer(
            self._training,
            AdamWSettings.of_run(train, max_steps=config.max_steps),
            dtype=shape.dtype,
            offload=self._offload,
        )
        self._chunk_tokens = chunk_tokens = max(1, int(train.backend.logits_mib * 2**20 / shape.logits_bytes_per_token))
        temperature = config.rollout.temperature
        self._value_head = self._make_value_head(config)
        self._passes = MegatronPasses(
            self._model,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            training=self._training,
            value_head=None if self._value_head is None else self._value_head.head,
        )
        self._reference = None
        if config.copies_reference:
            frozen = MegatronModel(config, settings, shape, place)
            self._reference = MegatronPasses(frozen, temperature=temperature, chunk_tokens=chunk_tokens)
        self._reference_is_loaded_model = True
        self._checkpoints = MegatronCheckpoints(self._training, self._optimizer, self._value_head, place)

    def _make_value_head(self, config: Config) -> ReplicatedValueHead | None:
        critic = config.algorithm.critic
        if critic is None:
            return None
        settings = AdamWSettings.of_critic(critic, config.train, max_steps=config.max_steps)
        width = self._vlm.text_config.hidden_size
        return ReplicatedValueHead(critic, settings, self._place, width=width, device=self._model.device)

    @property
    def _optimizers(self) -> list[PolicyOptimizer]:
        return [self._optimizer, *([] if self._value_head is None else [self._value_head])]

    def _forward(self, batch: Batch) -> Scored:
        return self._passes.scores(self._batcher.micro_batches(batch.groups))

    def _forward_reference(self, batch: Batch) -> Scored:
        micros = self._batcher.micro_batches(batch.groups)
        if self._reference is not None:
            return self._reference.scores(micros)
        with adapters_off(self._model.module):
            return self._passes.scores(micros)

    @property
    def _value_model(self) -> None:
        """None: a value head is always on the policy's trunk."""

    @contextmanager
    def _update_mode(self) -> Iterator[None]:
        self._passes.restart()
        self._training.train()
        yield
        self._training.eval()

    def _backward(self, groups: Sequence[SampleGroup], scale: float) -> PassResult:
        measured = self._passes.backward(self._batcher.micro_batches(groups), self._algorithm, scale)
        return PassResult.of(measured, self._ranks)

    def _tasks_of_bad_gradients(self, groups: Sequence[SampleGroup]) -> list[str]:
        # one backward pass per group, as on the torch backend, would involve all stages and all processes each time
        return [group.task_id for group in groups]

    def _weights_changed(self) -> None:
        """Do nothing: the engine is in another process, so no activations are reused."""

    def _pass_metrics(self) -> Metrics:
        work = self._passes.work
        return {"padded_frac": 1 - work.tokens / max(work.packed_tokens, 1)}

    def _supervised_trainer(self, settings: Warmup) -> SupervisedTrainer:
        passes = MegatronPasses(self._model, temperature=1.0, chunk_tokens=self._chunk_tokens, training=self._training)
        return supervised_trainer(passes, settings, offload=self._offload)

    def _merged_weights(self) -> Iterable[tuple[str, Tensor]]:
        return ((each.name, each.parameter) for each in self._model.merged_weights_to_sync())

    @property
    def _shares(self) -> tuple[int, ...]:
        return self._place.shares

    def snapshot_reference(self) -> None:
        """Copy the current weights into master weights and reference, and free the optimizer of the warm-up."""
        self._sft = None
        self._optimizer.sync_from_model()
        if self._reference is not None:
            copy_slices(self._model, self._reference.model)
            self._reference_is_loaded_model = False

    def weights_to_sync(self) -> Iterable[WeightToSync]:
        """Every full weight for a sync, with adapters separate; all processes must call it together."""
        return self._model.weights_to_sync()

    def merged_weights_to_sync(self) -> Iterable[WeightToSync]:
        """As `weights_to_sync`, for an engine without support for adapters."""
        return self._model.merged_weights_to_sync()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's weights."""
        return self._vlm.dtype

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and counters into an existing folder, each process its part."""
        reference = None if self._reference is None or self._reference_is_loaded_model else self._reference.model.chunk
        self._checkpoints.save(folder, self._counts, reference)

    def finish_save(self) -> None:
        """Do nothing: `save` has written everything."""

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote, on any number of processes; TrainError if it is of another model."""
        reference = None if self._reference is None else self._reference.model.chunk
        counts = self._checkpoints.load(folder, reference)
        self._steps, self._skipped_in_a_row = counts["steps"], counts["skipped_in_a_row"]
        self._reference_is_loaded_model = not counts[HAS_REFERENCE]

    def describe(self) -> ModelFacts:
        """Device, parameter counts of the whole model and number of processes."""
        device, network = self._model.device, self._vlm.network
        return ModelFacts(
            device=str(device),
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            parameters=tuple(count_parameters(network)),
            num_saved=sum(parameter.numel() for parameter in trainable_parameters(network).values())
            + (0 if self._value_head is None else self._value_head.num_parameters),
            num_workers=self._place.everyone.size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSavedPolicy:
    """Weights of a policy, read from a checkpoint."""

    weights: Mapping[str, Tensor]
    """Every full weight under its Hugging Face name, with adapters separate."""
    left_out: tuple[str, ...]
    """Names of the checkpoint's other parts: a value function, if there is one."""

    @staticmethod
    def read(config: Config, settings: Model, banned_ids: Sequence[int], checkpoint: Path) -> MegatronSavedPolicy:
        """Read the weights into an undivided model (as `config` says), and convert them by the bridge.

        TrainError if they belong to another model.
        """
        shape = skeleton(settings, banned_ids, config.seed)
        try:
            model = MegatronModel(config, settings, shape, ParallelRank.setup(config, shape.device))
            left_out = load_weights(checkpoint, model.chunk)
            weights = {weight.name: weight.parameter for weight in model.weights_to_sync()}
            return MegatronSavedPolicy(weights=weights, left_out=left_out)
        finally:
            parallel_state.destroy_model_parallel()
