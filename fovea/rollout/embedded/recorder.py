"""What a rollout leaves for the update that follows it (`models.tape`): linear outputs, and the vision tower's graph.

All or nothing for what runs together: once a request joins that does not fit or does not ask for it, nothing more is
kept until the engine has been idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fovea.models.image_features import ImageFeatures
from fovea.models.tape import Tape, Trace
from fovea.models.vlm import VLM
from fovea.rollout.embedded.batch import NOT_RECORDED, Ended
from fovea.rollout.embedded.request import Request
from fovea.types import PromptImage


@dataclass(frozen=True, slots=True)
class _Kept:
    """Of one request."""

    first_place: int
    """Of its prompt."""
    graph: Mapping[str, ImageFeatures]


class Recorder:
    """Between the engine and a tape; without a tape it does nothing."""

    def __init__(self, vlm: VLM, tape: Tape | None) -> None:
        self._vlm, self._tape = vlm, tape
        self._on = False
        self._graph: Mapping[str, ImageFeatures] = {}
        self._kept: dict[Request, _Kept] = {}

    def restart(self) -> None:
        """New weights: what was kept of the old ones is worth nothing."""
        if self._tape is not None:
            self._tape.restart()
        self._on = False
        self._graph, self._kept = {}, {}

    def features(self, requests: Sequence[Request], *, alone: bool) -> list[ImageFeatures]:
        """Of all images of these requests, each image encoded once; decides whether the requests are recorded.

        `alone`: no others are running.
        """
        images = [image for request in requests for image in request.prompt.images]
        wanted = self._tape is not None and (self._on or alone) and all(r.sampling.trace for r in requests)
        self._on = wanted and self._fits(requests, images)
        self._graph = self._vlm.image_graph(images) if self._on and self._vlm.trains_vision else {}
        if self._graph:
            return [self._graph[image.key].map(Tensor.detach) for image in images]
        return self._vlm.image_features(images) if images else []

    def _fits(self, requests: Sequence[Request], images: Sequence[PromptImage]) -> bool:
        assert self._tape is not None
        tokens = sum(request.prompt.num_tokens + request.n * request.limit_tokens for request in requests)
        graph_bytes = self._vlm.graph_bytes(images) if self._vlm.trains_vision else 0
        return self._tape.reserve(tokens, graph_bytes)

    @contextmanager
    def recording(self, tokens: int) -> Iterator[int]:
        """A forward pass of so many tokens; yields the place of the first, or NOT_RECORDED."""
        if not self._on or self._tape is None or not self._tape.holds_linears:
            yield NOT_RECORDED
            return
        with self._tape.recording(tokens) as place:
            yield place

    def prefilled(self, requests: Sequence[Request], first_place: int) -> None:
        """The prompts stand one after the other from `first_place` on."""
        for request in requests if self._on else ():
            self._kept[request] = _Kept(first_place, self._graph)
            first_place += request.prompt.num_tokens

    def trace(self, ended: Ended) -> Trace | None:
        """What was kept of a completion; None when anything is missing."""
        kept = self._kept.get(ended.row.request)
        if kept is None or self._tape is None:
            return None
        prompt_tokens = ended.row.request.prompt.num_tokens
        if self._tape.holds_linears and bool((ended.places_T == NOT_RECORDED).any()):
            return None
        return Trace(
            tape=self._tape,
            rollout=self._tape.rollout,
            prompt_places_L=kept.first_place + np.arange(prompt_tokens),
            places_T=ended.places_T,
            features=kept.graph,
        )
