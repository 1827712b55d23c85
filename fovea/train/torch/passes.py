"""Forward and backward passes of the trainer over micro-batches, and the rollout activations that they reuse.

Axes: `A` actions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fovea.config.algorithm import Algorithm
from fovea.config.sections import Train
from fovea.models.activation_tape import ImageGraph, RecordedOutputs, Tape, Trace
from fovea.models.head_gradients import LossGradients
from fovea.models.heads import ValueHead
from fovea.models.policy_network import PolicyNetwork
from fovea.models.recompute import kept_bytes
from fovea.models.shared_prefix.layout import PackedRow
from fovea.models.token_logprobs import TokenScores
from fovea.train.loss import Measured, policy_loss, precomputed_loss_gradients
from fovea.train.microbatches import MicroBatcher, MicrobatchLimit
from fovea.train.packing import MicroBatch
from fovea.train.ranks import Ranks
from fovea.train.row_assignment import distinct
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.sharding import copy_weights, shards_tower
from fovea.train.update_metrics import ActivationMeter
from fovea.types import Batch, Sample, SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFunction:
    """Value function of PPO: a head on the policy's trunk (`model` is None), or a separate model."""

    optimizer: Optimizer
    model: ValueModel | None

    def snapshot_reference(self, policy: PolicyNetwork) -> None:
        """Copy the policy's weights into the trunk of a separate model, and all weights into the master weights."""
        if self.model is not None:
            # only the trunk: the policy has no weights for the value head
            copy_weights(dict(policy.named_parameters()), dict(self.model.trunk.named_parameters()))
        self.optimizer.masters.sync_from_model()


class ValueModel(nn.Module):
    """A PolicyNetwork's trunk with a value head in place of the language-model head."""

    def __init__(self, trunk: PolicyNetwork) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(trunk.text_config.hidden_size, detach_trunk=False)

    def forward(self, row: PackedRow) -> Tensor:
        """Values [A] of the states before each action."""
        values_U: Tensor = self.head(self.trunk.action_states(row))
        return values_U[row.computed_A]


MIN_SHARE_OF_GRAPH = 2 / 3
"""Smallest share of a graph's visual tokens that the update must need for the graph to be reused. A backward pass goes
through all images of the graph and costs twice a forward pass: below 2/3, encoding the needed images again is cheaper
(with checkpointed blocks, which compute forward once more, below 3/4)."""


@contextmanager
def dropout_seed(step: int, ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Seed torch's generators by step and rank in this context, and restore their states afterwards.

    The seed depends only on counters, so that a resumed run has the dropout masks of an uninterrupted one, and on the
    rank, so that each rank has different masks for its rows.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence((step, ranks.rank)).generate_state(1)[0]))
        yield


class Scorer:
    """Packs samples into micro-batches for one rank, and runs the network on them."""

    def __init__(
        self, vlm: PolicyNetwork, train: Train, temperature: float, ranks: Ranks, limit: MicrobatchLimit
    ) -> None:
        self.vlm = vlm
        self.batcher = MicroBatcher(vlm, train, ranks, limit, shards_tower=shards_tower(vlm))
        self.activations = ActivationMeter(vlm, partial(kept_bytes, vlm.network))
        self.temperature = temperature
        # the logits are the largest tensor of a pass, so they are computed for this many actions at a time
        self._chunk_tokens = max(1, int(train.backend.logits_mib * 2**20 / vlm.logits_bytes_per_token))

    def __call__(self, row: PackedRow, loss_gradients: LossGradients | None = None) -> TokenScores:
        """Scores of the row's actions; give `loss_gradients` if a backward pass of that loss follows."""
        scores: TokenScores = self.vlm(
            row, temperature=self.temperature, chunk_tokens=self._chunk_tokens, loss_gradients=loss_gradients
        )
        return scores

    @torch.no_grad()
    def score(self, batch: Batch) -> list[tuple[MicroBatch, TokenScores]]:
        """Scores of this rank's micro-batches under the current weights."""
        return [(micro, self(micro.row)) for micro in self.batcher.micro_batches(batch.groups)]


def policy_pass(scorer: Scorer, micro: MicroBatch, row: PackedRow, algorithm: Algorithm, scale: float) -> Measured:
    """Run a micro-batch forward, through `scale` times its loss, and backward; `row` may read recorded activations."""
    with scorer.activations(row.num_tokens):
        # no variable for the scores: it would hold the graph, and with it memory, until the end of this pass
        loss, measured = policy_loss(
            scorer(row, precomputed_loss_gradients(micro, algorithm, scale)), micro, algorithm, scale
        )
    # a text row has no graph if only the vision tower has adapters; with a sharded tower, all ranks have one or none
    # has
    if loss.requires_grad:
        # even if the loss is not finite: the other ranks' backward passes wait for this one's collectives
        loss.backward()
    return measured


@dataclass(slots=True)
class Reuse:
    """Rollout activations for the packed rows of one optimizer step."""

    graph: ImageGraph
    """Features by image key, with their autograd graph; images without an entry are encoded again."""
    leaves: ImageGraph
    """The same features, detached; they accumulate gradients."""
    tape: Tape
    actions: int = 0
    """Number of actions whose linear outputs were read from the tape."""

    @staticmethod
    def of(groups: Sequence[SampleGroup], tape: Tape) -> Reuse:
        """Activations worth reusing for these groups. Frees all other graphs of the tape."""
        samples = [sample for group in groups for sample in group.samples]
        traces = [trace for sample in samples if (trace := _trace(sample, tape))]
        graphs = {trace.graph_number: tape.graph(trace.graph_number) for trace in traces}
        needed = {image.key for group in groups for image in group.prompt.images}
        worth = [graph for graph in graphs.values() if _share(graph, needed) >= MIN_SHARE_OF_GRAPH]
        tape.free_graphs()
        graph = {key: features for each in worth for key, features in each.items()}
        leaves = {key: features.map(lambda x: x.detach().requires_grad_()) for key, features in graph.items()}
        return Reuse(graph, leaves, tape)

    def row(self, micro: MicroBatch) -> PackedRow:
        """The packed row of a micro-batch with its recorded features and linear outputs, where all of them exist."""
        row, features = micro.row, None
        # all or none: the vision tower runs on all images of a row in one pass
        if row.images and all(image.key in self.leaves for image in row.images):
            features = tuple(self.leaves[image.key] for image in row.images)
        recorded = recorded_outputs(micro, self.tape)
        self.actions += row.num_actions if recorded is not None else 0
        return replace(row, features=features, recorded=recorded)

    def finish(self) -> dict[str, float]:
        """Backpropagate the accumulated gradients through the vision tower; returns how much was reused."""
        pairs = [
            (tensor, leaf.grad)
            for key, features in self.graph.items()
            for tensor, leaf in zip(features.tensors, self.leaves[key].tensors, strict=True)
            if leaf.grad is not None
        ]
        if pairs:
            outputs, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, gradients)
        return {"reused_actions": float(self.actions), "reused_images": float(len(self.graph))}


def recorded_outputs(micro: MicroBatch, tape: Tape) -> RecordedOutputs | None:
    """Recorded linear outputs of the row; None unless the tape holds those of every token."""
    of_groups = [distinct(group.samples)[0] for group in micro.groups]
    traces = [[_trace(sample, tape) for sample in samples] for samples in of_groups]
    known = [[trace for trace in group if trace is not None and trace.holds_linears] for group in traces]
    if [len(group) for group in known] != [len(samples) for samples in of_groups]:
        return None
    # group[0]: the samples of a group share one prompt, which is on the tape once and in the row once
    places = [x for group in known for x in (group[0].prompt_places_L, *(trace.places_T for trace in group))]
    return RecordedOutputs(tape=tape, places_N=torch.from_numpy(np.concatenate(places)))


def _trace(sample: Sample, tape: Tape) -> Trace | None:
    """Trace of a sample; None for an episode of several turns, whose activations are not recorded."""
    return tape.trace(sample.completion_ids[0]) if len(sample.completion_ids) == 1 else None


def _share(graph: ImageGraph, needed: set[str]) -> float:
    """Share of a graph's visual tokens that are needed; 0 for an empty graph."""
    tokens = {key: len(features.embeds_VD) for key, features in graph.items()}
    return sum(n for key, n in tokens.items() if key in needed) / max(sum(tokens.values()), 1)
