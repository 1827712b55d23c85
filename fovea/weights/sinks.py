"""Sinks of engines that sample with a network of Fovea's: the policy's own tensors, or a copy of them.

An engine with its own weights (vLLM, SGLang, servers, another environment) is a `WeightSink` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fovea.errors import EngineError
from fovea.rollout.checks import check_shapes
from fovea.types import Shape, Weights
from fovea.utils.checksum import bit_hash, read_hashes


class NetworkEngine(Protocol):
    """An engine that samples with tensors in this process."""

    def own_weights(self) -> Weights:
        """The tensors of the engine's network, under the names of a push."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take references to these weights, all of them, and empty all caches made with older ones."""
        ...


class SharedTensors:
    """Gives an engine the policy's tensors themselves; nothing is copied."""

    def __init__(self, engine: NetworkEngine) -> None:
        self._engine = engine
        self._tensors: dict[str, Tensor] = {}
        """The last tensor of each name."""
        self.has_weights = False

    def begin_push(self, shapes: Mapping[str, Shape]) -> None:
        _check(shapes, dict(self._engine.own_weights()), has_all=self.has_weights)

    def take_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self._tensors |= bucket

    def finish_push(self, version: int) -> None:
        self._engine.load_weights(self._tensors, version)
        self.has_weights = True


class NetworkCopy:
    """Copies into the tensors of an engine's network, in place."""

    def __init__(self, engine: NetworkEngine) -> None:
        self._engine = engine
        self._own = dict(engine.own_weights())
        self._sent: dict[str, Tensor] = {}
        """Hashes of the tensors of this push, as the engine holds them if they arrive."""
        self.has_weights = False

    def begin_push(self, shapes: Mapping[str, Shape]) -> None:
        _check(shapes, self._own, has_all=self.has_weights)
        self._sent = {}

    @torch.no_grad()
    def take_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in bucket:
            own = self._own[name]
            if not own.untyped_storage().nbytes():
                own.untyped_storage().resize_(own.nbytes)  # the engine's sleep has freed it
            own.copy_(tensor)
            self._sent[name] = bit_hash(tensor.to(own.dtype))

    def finish_push(self, version: int) -> None:
        # after the last tensor: one that shares memory with another would be overwritten later
        sent, held = read_hashes(list(self._sent.values()), [bit_hash(self._own[name]) for name in self._sent])
        differing = [name for name, one, other in zip(self._sent, sent, held, strict=True) if one != other]
        if differing:
            raise EngineError(
                f"the weight {differing[0]} differs between trainer and engine after it was copied; run again, and "
                "report this as a bug if it comes back"
            )
        self._engine.load_weights(self._own, version)
        self.has_weights = True


def _check(shapes: Mapping[str, Shape], own: Mapping[str, Tensor], *, has_all: bool) -> None:
    """EngineError unless these are all of an engine's weights or, where it has all, some of them."""
    due = shapes.keys() & own.keys() if has_all else own.keys()
    check_shapes(shapes, {name: tuple(own[name].shape) for name in due}, engine="the engine")
