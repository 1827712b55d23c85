"""The planned step: groups of the assumed lengths, cut into packed rows as the trainer cuts them.

Axes: `L` tokens of a prompt, `T` tokens of a completion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from fovea.config.backends import MegatronBackend
from fovea.config.run import Config
from fovea.models.flops import training_passes
from fovea.train.model_division import check_processes
from fovea.train.ranks import check_replicas
from fovea.train.row_assignment import Cost, RowSlices, rows_by_cost, rows_by_count, slice_groups
from fovea.types import Prompt, PromptImage, Sample, SampleGroup
from fovea_gym.errors import ConfigError
from fovea_tools.plan.model_sizes import ModelSizes

BYTES_OF = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Numbers of GPUs by role."""

    trainers: int
    engines: int
    apart: bool
    """True if training and generation have separate GPUs."""
    shares: int
    """Parts that micro-batches are divided into: GPUs that train, or groups of GPUs with a whole model (Megatron)."""
    stages: int = 1
    """Number of pipeline stages."""
    stage: int = 0
    """Pipeline stage of the planned GPU."""
    is_divided: bool = False
    """True if Megatron holds the policy, in slices that no engine can sample with."""

    @property
    def shares_tensors(self) -> bool:
        """True in a single process, whose engine samples with the policy's own tensors."""
        return self.trainers == self.engines == 1 and not (self.apart or self.is_divided)


def roles_of(config: Config, gpus: int) -> Roles:
    """The roles of this many GPUs; ConfigError if none is left to train, or `replicas` does not divide the others."""
    cluster = config.cluster
    trainers = gpus - cluster.rollout_gpus
    if trainers < 1:
        raise ConfigError(
            f"cluster.rollout_gpus={cluster.rollout_gpus} leaves no GPU of {gpus} for training; lower it, or raise "
            "plan.gpus"
        )
    apart, backend = cluster.placement == "disaggregated", config.train.backend
    roles = Roles(trainers=trainers, engines=cluster.rollout_gpus if apart else gpus, apart=apart, shares=trainers)
    if not isinstance(backend, MegatronBackend):
        check_replicas(backend.replicas, trainers)
        return roles
    check_processes(backend, trainers)
    stages = backend.pipeline_parallel_size
    shares = trainers // (backend.tensor_parallel_size * stages)
    return replace(roles, shares=shares, stages=stages, is_divided=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Assumed sizes of every prompt and completion."""

    prompt_tokens: int
    """Tokens of a prompt, including visual tokens."""
    completion_tokens: int
    images: int
    image_tokens: int
    patches: int
    """Patches of one image."""
    state_tokens: int = 0
    """Tokens of the cache that take as much memory as a completion's states of delta nets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """Sizes of one packed row that decide its memory."""

    tokens: int
    actions: int
    predictors: int
    """Tokens that predict an action: the last layer computes no others after its attention."""
    block_tokens: int
    """Tokens in the padded blocks of prompts and completions, on which attention runs on a CPU."""
    keys: int
    """Keys of all segments; a prompt's keys count once for the prompt and once for each of its completions."""
    patches: int
    visual_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Work of one rank in a step."""

    lengths: Lengths
    rows: tuple[tuple[RowShape, ...], ...]
    """Packed rows of the busiest rank, by minibatch."""
    update_flops: float
    """Model FLOPs of the policy's update on all ranks."""
    images: tuple[PromptImage, ...]
    """The images of one prompt."""
    rank_prompts: int
    """Number of prompts that one engine generates completions for."""

    @property
    def distinct_rows(self) -> set[RowShape]:
        return {row for minibatch in self.rows for row in minibatch}

    @property
    def rows_per_minibatch(self) -> int:
        return max(map(len, self.rows))


def lengths_of(config: Config, sizes: ModelSizes) -> Lengths:
    """The lengths that the `plan` section sets, or else the recipe's limits."""
    plan = config.plan
    prompt = plan.prompt_tokens or config.data.max_prompt_tokens
    images = plan.images_per_prompt
    token_px = sizes.patch_px * sizes.merged_side
    of_limit = None if config.model.max_pixels is None else config.model.max_pixels // token_px**2
    # a prompt with images also has text, at least one token
    room = (prompt - 1) // max(images, 1)
    image_tokens = min(plan.image_tokens or of_limit or room, room)
    if images and not image_tokens:
        raise ConfigError(
            f"plan.prompt_tokens={prompt} has no room for a visual token of each of {images} images; raise it, or set "
            "plan.images_per_prompt=0"
        )
    return Lengths(
        prompt_tokens=prompt,
        completion_tokens=plan.completion_tokens or config.rollout.max_new_tokens,
        images=images,
        image_tokens=image_tokens if images else 0,
        patches=math.prod(sizes.grid(image_tokens)) if images else 0,
        state_tokens=sizes.decoder.state_tokens(BYTES_OF[config.model.dtype]),
    )


def workload_of(config: Config, sizes: ModelSizes, roles: Roles) -> Workload:
    """The step of these settings with these roles; TrainError if a group does not fit a micro-batch."""
    lengths = lengths_of(config, sizes)
    group = _group(lengths, sizes.grid(lengths.image_tokens), config.rollout.samples_per_prompt)
    passes = training_passes(
        lora=config.model.lora is not None,
        trains_vision=config.model.trains_tower,
        features_cached=not (sizes.trains_vision or roles.is_divided),
    )
    cost = Cost(work=sizes.family.work, passes=passes)
    prompts, epochs = config.rollout.prompts_per_step, config.algorithm.ppo_epochs
    bounds = np.linspace(0, prompts, config.algorithm.minibatches + 1).astype(int)
    sizes_of_minibatches = [int(end - start) for start, end in pairwise(bounds)]
    # all groups are alike, and so are minibatches of the same size
    rows = {size: _rows(config, cost, [group] * size, roles) for size in set(sizes_of_minibatches)}
    return Workload(
        lengths=lengths,
        rows=tuple(rows[size] for size in sizes_of_minibatches),
        update_flops=epochs * prompts * sum(map(cost.flops, _computed(group, roles))),
        images=group.prompt.images,
        rank_prompts=math.ceil(prompts / roles.engines),
    )


def _rows(config: Config, cost: Cost, groups: Sequence[SampleGroup], roles: Roles) -> tuple[RowShape, ...]:
    """The rows of the share with the most rows; the other shares add dummy rows to have as many."""
    train, shares = config.train, roles.shares
    if train.enable_dynamic_batch_size:
        max_tokens = train.max_tokens_per_microbatch
        packed = rows_by_cost(slice_groups(groups, max_tokens), cost, shares, max_tokens)
    else:
        packed = rows_by_count(slice_groups(groups), cost, shares, train.groups_per_microbatch)
    return max((tuple(_shape(row, roles) for row in rows) for rows in packed), key=len)


def _computed(group: SampleGroup, roles: Roles) -> list[SampleGroup]:
    """A group as the trainer computes it: under Megatron every completion has a copy of its prompt."""
    return [replace(group, samples=(sample,)) for sample in group.samples] if roles.is_divided else [group]


def _shape(row: RowSlices, roles: Roles) -> RowShape:
    groups = [part for each in row for part in _computed(each.group, roles)]
    inputs = [[len(sample.token_ids_T) - 1 for sample in group.samples] for group in groups]
    prompts = [group.prompt.num_tokens for group in groups]
    longest = max((tokens for lengths in inputs for tokens in lengths), default=0)
    return RowShape(
        tokens=sum(prompts) + sum(tokens for lengths in inputs for tokens in lengths),
        actions=sum(tokens + 1 for lengths in inputs for tokens in lengths),
        # the completions of a group share the predictor of their first token, the last token of the prompt
        predictors=sum(1 + sum(lengths) for lengths in inputs if lengths),
        block_tokens=len(groups) * max(prompts) + len(groups) * max(map(len, inputs)) * longest,
        keys=sum(
            prompt + sum(prompt + tokens for tokens in lengths if tokens)
            for prompt, lengths in zip(prompts, inputs, strict=True)
        ),
        patches=sum(
            len(group.prompt.images) * math.prod(group.prompt.images[0].grid) for group in groups if group.images
        ),
        visual_tokens=sum(image.num_tokens for group in groups for image in group.prompt.images),
    )


def _group(lengths: Lengths, grid: tuple[int, int, int], samples: int) -> SampleGroup:
    """A group of these lengths without pixels and with meaningless tokens; equal samples would be deduplicated."""
    ids_L = np.zeros(lengths.prompt_tokens, np.int64)
    image = PromptImage(key="", tensors={}, num_tokens=lengths.image_tokens, grid=grid)
    prompt = Prompt(token_ids_L=ids_L, unexpanded_ids_U=ids_L, images=(image,) * lengths.images)
    count = lengths.completion_tokens
    first = Sample(
        token_ids_T=np.full(count, 0),
        mask_T=np.ones(count, np.bool_),
        rollout_logprobs_T=np.zeros(count, np.float32),
        reward=0.0,
        weight=1.0,
    )
    unequal = tuple(replace(first, token_ids_T=np.full(count, number)) for number in range(samples))
    return SampleGroup(prompt=prompt, samples=unequal)
