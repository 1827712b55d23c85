"""What an update takes over from the rollout that drew its samples, while the weights are still the same.

The decoder's linear outputs come from the tape (`models.activation_tape`). The vision tower's graph is entered
once: rows get leaves in place of its features, and when all rows have left their gradients there, one backward pass
goes through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fovea.models.activation_tape import ImageGraph, Recall, Tape, Trace
from fovea.models.shared_prefix.packed_row import PackedRow
from fovea.train.packing import MicroBatch
from fovea.types import Sample, SampleGroup

MIN_SHARE_OF_GRAPH = 2 / 3
"""A backward pass costs twice a forward pass and goes through all images of the graph: with fewer of them in the update
than this, encoding those again is cheaper."""


@dataclass(slots=True)
class Reuse:
    """For the rows of one optimizer step."""

    graph: ImageGraph
    """Features by image key, with the graph that made them; empty: the tower is asked again."""
    leaves: ImageGraph
    """The same without it, to collect gradients."""
    tape: Tape
    actions: int = 0
    """Whose forward pass was looked up."""

    @staticmethod
    def of(groups: Sequence[SampleGroup], tape: Tape) -> Reuse:
        """Take over what is worth it for these groups; other graphs are freed."""
        samples = [sample for group in groups for sample in group.samples]
        traces = [trace for sample in samples if (trace := _trace(sample, tape))]
        graphs = {trace.graph_number: tape.graph(trace.graph_number) for trace in traces}
        needed = {image.key for group in groups for image in group.prompt.images}
        worth = [graph for graph in graphs.values() if _share(graph, needed) >= MIN_SHARE_OF_GRAPH]
        tape.forget_graphs()
        graph = {key: features for each in worth for key, features in each.items()}
        leaves = {key: features.map(lambda x: x.detach().requires_grad_()) for key, features in graph.items()}
        return Reuse(graph, leaves, tape)

    def row(self, micro: MicroBatch) -> PackedRow:
        """The row with what is known of it."""
        row, features = micro.row, None
        if row.images and all(image.key in self.leaves for image in row.images):
            features = tuple(self.leaves[image.key] for image in row.images)
        recall = recall_of(micro, self.tape)
        self.actions += row.num_actions if recall is not None else 0
        return replace(row, features=features, recall=recall)

    def finish(self) -> None:
        """Send the collected gradients through the vision tower."""
        pairs = [
            (tensor, leaf.grad)
            for key, features in self.graph.items()
            for tensor, leaf in zip(features.tensors, self.leaves[key].tensors, strict=True)
            if leaf.grad is not None
        ]
        if pairs:
            outputs, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(outputs, gradients)


def recall_of(micro: MicroBatch, tape: Tape) -> Recall | None:
    """Where the linear outputs of the row stand on the tape; None unless all are there."""
    traces = [[_trace(sample, tape) for sample in group.samples] for group in micro.groups]
    known = [[trace for trace in group if trace is not None and trace.holds_linears] for group in traces]
    if [len(group) for group in known] != [len(group.samples) for group in micro.groups]:
        return None
    places = [x for group in known for x in (group[0].prompt_places_L, *(trace.places_T for trace in group))]
    joined = torch.from_numpy(np.concatenate(places))
    if len(joined) != micro.row.num_tokens:  # padded to a fixed length
        return None
    return Recall(tape=tape, places_N=joined)


def _trace(sample: Sample, tape: Tape) -> Trace | None:
    """Where a sample's activations stand; None for several turns, of which no rollout keeps activations."""
    return tape.trace(sample.completion_ids[0]) if len(sample.completion_ids) == 1 else None


def _share(graph: ImageGraph, needed: set[str]) -> float:
    """Of the visual tokens of a graph, how many are needed; 0 where there are none."""
    tokens = {key: len(features.embeds_VD) for key, features in graph.items()}
    return sum(n for key, n in tokens.items() if key in needed) / max(sum(tokens.values()), 1)
