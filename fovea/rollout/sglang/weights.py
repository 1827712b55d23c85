"""Weight sync into SGLang: names and shapes are checked first, then weights are loaded in buckets, then read back.

An unknown name or a wrong shape makes SGLang's scheduler exit. The first weight sync must therefore send all weights of
the checkpoint that SGLang was started from, in its shapes, and later ones a subset of them; any other weight sync is
refused before it begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fovea.processes.engine_process import EngineProcess
from fovea.rollout.checks import check_shapes, checkpoint_shapes
from fovea.types import Shape
from fovea.utils.checksum import read_hashes, value_hash
from fovea.utils.tensor_records import handles


class Sent(NamedTuple):
    """Size and hash of a weight that was sent."""

    num_rows: int
    num_values: int
    bits: int
    """The weight's `value_hash` in the engine's dtype."""


class SglangWeights:
    """Loads the weights of a policy into SGLang."""

    def __init__(
        self,
        process: EngineProcess,
        model: str,
        revision: str | None,
        *,
        dtype: torch.dtype,
        is_tied: bool,
        workers: int,
    ) -> None:
        self._process = process
        self._dtype = dtype
        self._workers = workers
        held = checkpoint_shapes(model, revision, is_tied=is_tied)
        self._expected = {plain_name(name): shape for name, shape in held.items()}
        self._names = {plain_name(name): name for name in held}
        """Names in the checkpoint, under which SGLang loads weights, by plain names."""
        self.are_complete = False
        """True if SGLang holds all weights, and the last weight sync has finished."""
        self._sending: dict[str, tuple[Shape, Tensor]] = {}
        """Shape and hash of each weight of this weight sync, by its name in the checkpoint; the hashes are still on the
        device."""
        self._sent: dict[str, Sent] = {}
        """The newest values of all weights that were sent, by their names in the checkpoint."""

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise EngineError for a wrong name or shape, and for a missing weight unless SGLang holds all weights."""
        sent = {plain_name(name): shape for name, shape in shapes.items()}
        wanted = sent.keys() & self._expected.keys() if self.are_complete else self._expected.keys()
        check_shapes(sent, {name: self._expected[name] for name in wanted}, engine="SGLang")

    def begin(self) -> None:
        """Prepare for weights that `check` has accepted."""
        self.are_complete, self._sending = False, {}
        self._process.run("begin_sync")

    def take(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load a bucket of weights."""
        named = [(self._names[plain_name(name)], tensor) for name, tensor in bucket]
        self._sending |= {name: (tuple(tensor.shape), value_hash(tensor, self._dtype)) for name, tensor in named}
        self._process.run("receive_weights", [handles(named) for _ in range(self._workers)])

    def finish(self) -> None:
        """Finish the weight sync and empty all caches; EngineError if SGLang's weights differ from those sent."""
        (hashes,) = read_hashes([each for _, each in self._sending.values()])
        for (name, (shape, _)), bits in zip(self._sending.items(), hashes, strict=True):
            self._sent[name] = Sent(shape[0], prod(shape), bits)
        self._process.run("finish_sync", json.dumps(self._sent))
        self.are_complete = True

    def forget(self) -> None:
        """Record that SGLang has freed its weights; the next weight sync must send all of them."""
        self.are_complete = False


def plain_name(name: str) -> str:
    """Strip from a weight's name the level between model and language model that some checkpoints have."""
    for nested, plain in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        if name.startswith(nested):
            return plain + name.removeprefix(nested)
    return name
