"""Sinks of engines that sample with a network of Fovea's: the policy's own tensors, or a copy of them.

An engine with its own weights (vLLM, SGLang, servers, another environment) is a `WeightSink` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fovea.errors import EngineError
from fovea.rollout.base import Engine
from fovea.rollout.checks import check_shapes
from fovea.types import Shape, Weights
from fovea.utils.checksum import bit_hash, read_hashes


class NetworkEngine(Engine, Protocol):
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
        self._names: list[str] = []
        """Names of the tensors of this push, in its order."""
        self._converted: dict[str, Tensor] = {}
        """Hashes of those that have another type in the engine, as it holds them if they arrive."""
        self.has_weights = False

    def begin_push(self, shapes: Mapping[str, Shape]) -> None:
        _check(shapes, self._own, has_all=self.has_weights)
        self._names, self._converted = [], {}

    @torch.no_grad()
    def take_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in bucket:
            own = self._own[name]
            if not own.untyped_storage().nbytes():
                own.untyped_storage().resize_(own.nbytes)  # the engine's sleep has freed it
            own.copy_(tensor)
            self._names.append(name)
            if tensor.dtype != own.dtype:
                self._converted[name] = bit_hash(tensor.to(own.dtype))

    def hashes(self) -> list[Tensor]:
        """Hashes of the tensors of this push as the engine holds them, then of those that it holds in another type.

        To be taken after the last tensor: one that shares memory with another would be overwritten later.
        """
        return [*(bit_hash(self._own[name]) for name in self._names), *self._converted.values()]

    def compare(self, sent: Sequence[int], numbers: Sequence[int]) -> None:
        """Compare the numbers of `hashes` with those of the tensors that were sent; EngineError where one differs."""
        held, converted = numbers[: len(self._names)], numbers[len(self._names) :]
        due = dict(zip(self._names, sent, strict=True)) | dict(zip(self._converted, converted, strict=True))
        differing = [name for name, number in zip(self._names, held, strict=True) if number != due[name]]
        if differing:
            raise EngineError(
                f"the weight {differing[0]} differs between trainer and engine after it was copied; run again, and "
                "report this as a bug if it comes back"
            )

    def finish_push(self, version: int) -> None:
        """Let the engine use its tensors, which `read_compared` has compared."""
        self._engine.load_weights(self._own, version)
        self.has_weights = True


def read_compared(hashes: Sequence[Tensor], sinks: Sequence[object]) -> list[int]:
    """The numbers of the hashes of what was sent, compared with what copies hold, in one read of the device."""
    copies = [sink for sink in sinks if isinstance(sink, NetworkCopy)]
    sent, *found = read_hashes(hashes, *(copy.hashes() for copy in copies))
    for copy, numbers in zip(copies, found, strict=True):
        copy.compare(sent, numbers)
    return sent


def _check(shapes: Mapping[str, Shape], own: Mapping[str, Tensor], *, has_all: bool) -> None:
    """EngineError unless these are all of an engine's weights or, where it has all, some of them."""
    due = shapes.keys() & own.keys() if has_all else own.keys()
    check_shapes(shapes, {name: tuple(own[name].shape) for name in due}, engine="the engine")
