"""Recording of a rollout's activations for its update: linear outputs and the vision tower's graph.

The tape is `models.activation_tape`. Requests that run together are all recorded, or none is: when one joins that does
not fit or is not for an update, recording stops until the engine has been idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fovea.models.activation_tape import NOT_RECORDED, ImageGraph, Tape, Trace
from fovea.models.vision.feature_cache import ImageFeatures
from fovea.models.vlm import VLM
from fovea.rollout.embedded.requests import QueuedRequest, RemovedRow
from fovea.types import PromptImage


@dataclass(frozen=True, slots=True)
class _Kept:
    """Tape entries of one request."""

    first_place: int
    """Tape place of the prompt's first token; NOT_RECORDED if linear outputs are not recorded."""
    graph_number: int


class Recorder:
    """Records forward passes of the engine on a tape; does nothing without a tape."""

    def __init__(self, vlm: VLM, tape: Tape | None) -> None:
        self._vlm, self._tape = vlm, tape
        self._on = self._records = False
        """True if the running requests are recorded; `_records` is True if this includes their linear outputs."""
        self._graph_number = 0
        self._kept: dict[QueuedRequest, _Kept] = {}

    def restart(self) -> None:
        """Drop all recordings, because new weights make them stale."""
        if self._tape is not None:
            self._tape.restart()
        self._on = self._records = False
        self._kept = {}

    def features(self, requests: Sequence[QueuedRequest], *, alone: bool) -> list[ImageFeatures]:
        """Compute the features of the requests' new images, and decide what to record of the requests.

        `alone` says that no other requests are running.
        """
        images = [image for request in requests for image in request.new_images]
        graph = self._decide(requests, images, alone)
        if graph:
            # the tape keeps the graph for the update; decoding needs only the values
            return [graph[image.key].map(Tensor.detach) for image in images]
        return self._vlm.rollout_features(images) if images else []

    def _decide(self, requests: Sequence[QueuedRequest], images: Sequence[PromptImage], alone: bool) -> ImageGraph:
        """Reserve tape for linear outputs and the vision graph, or only for the graph; returns the graph."""
        tape, asked = self._tape, all(request.request.for_update for request in requests)
        if tape is None or not asked or not (alone or self._on):
            self._on = self._records = False
            return {}
        # reserved for the worst case, since a tape that overflows in the middle of a rollout would be useless
        tokens = sum(request.prompt.num_tokens + request.n * request.limit_tokens for request in requests)
        graph_bytes = self._vlm.graph_bytes(images) if self._vlm.trains_vision else 0
        records = tape.holds_linears and (alone or self._records)
        # if linear outputs do not fit, the graph by itself may
        self._records = records and tape.reserve(tokens, graph_bytes)
        self._on = self._records or tape.reserve(0, graph_bytes)
        graph = self._vlm.image_graph(images) if self._on and self._vlm.trains_vision else {}
        self._graph_number = tape.keep_graph(graph)
        return graph

    @contextmanager
    def recording(self, tokens: int) -> Iterator[int]:
        """Record a forward pass; yields the tape place of its first token, or NOT_RECORDED."""
        if not self._records or self._tape is None:
            yield NOT_RECORDED
            return
        with self._tape.recording(tokens) as place:
            yield place

    def prefilled(self, requests: Sequence[QueuedRequest], first_place: int) -> None:
        """Record the tape places of these prompts, which are consecutive from `first_place` on."""
        for request in requests if self._on else ():
            self._kept[request] = _Kept(first_place, self._graph_number)
            first_place += request.prompt.num_tokens if first_place != NOT_RECORDED else 0

    def record_trace(self, completion_id: str, finished: RemovedRow) -> None:
        """Store the tape places of a finished completion, if it was recorded."""
        kept = self._kept.get(finished.row.request)
        if kept is None or self._tape is None:
            return
        recorded = kept.first_place != NOT_RECORDED
        prompt_tokens = finished.row.request.prompt.num_tokens if recorded else 0
        trace = Trace(
            prompt_places_L=kept.first_place + np.arange(prompt_tokens),
            places_T=finished.places_T,
            graph_number=kept.graph_number,
        )
        self._tape.keep_trace(completion_id, trace)
