"""An engine on its own tensors, into which a push copies the policy's one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fovea.errors import EngineError
from fovea.types import Shape
from fovea.utils.checksum import bit_hash, combined, read_hashes
from fovea.weights.base import SyncReport, WeightTarget, check_names


class WeightTaker(Protocol):
    """A destination of the tensors of one push, which come one after the other."""

    @property
    def needs_all(self) -> bool:
        """True if the next push must bring all weights, since none are held."""
        ...

    def begin(self, shapes: Mapping[str, Shape]) -> None:
        """Check the names and shapes of all tensors that will come, before the first does.

        EngineError, and nothing changed, if they do not match.
        """
        ...

    def take(self, name: str, tensor: Tensor) -> None:
        """Take a full tensor."""
        ...

    def finish(self, version: int, sent: Sequence[Tensor]) -> SyncReport:
        """Complete the push; EngineError if an engine holds other bits than were sent.

        `sent` are the `bit_hash`es of the tensors, in the order in which they came.
        """
        ...


class EngineCopy:
    """Copies into the tensors of an engine in this process, in place; a tensor that it shares is left as it is."""

    def __init__(self, target: WeightTarget) -> None:
        self._target = target
        self._own = dict(target.own_weights())
        self._is_filled = False
        self._fits: dict[str, bool] = {}
        """Names of the tensors of this push, and whether they have shape and type of the engine's."""
        self._bytes = 0

    @property
    def needs_all(self) -> bool:
        return not self._is_filled

    def begin(self, shapes: Mapping[str, Shape]) -> None:
        # all of them in the first push, the trained ones in later pushes
        check_names(shapes, shapes.keys() & self._own.keys() if self._is_filled else self._own)
        self._fits, self._bytes = {}, 0

    @torch.no_grad()
    def take(self, name: str, tensor: Tensor) -> None:
        own = self._own[name]
        if not own.untyped_storage().nbytes():
            own.untyped_storage().resize_(own.nbytes)  # the engine's sleep has freed it
        fits = (own.shape, own.dtype) == (tensor.shape, tensor.dtype)
        self._fits[name] = fits
        if fits and own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor)
            self._bytes += tensor.nbytes

    def finish(self, version: int, sent: Sequence[Tensor]) -> SyncReport:
        # after the last tensor: one that shares memory with another would be overwritten later
        wanted, held = read_hashes(sent, [bit_hash(self._own[name]) for name in self._fits])
        compared = zip(self._fits.items(), wanted, held, strict=True)
        differing = [name for (name, fits), one, other in compared if not fits or one != other]
        if differing:
            raise EngineError(
                f"the weight {differing[0]} differs between trainer and engine after it was copied; run again, and "
                "report this as a bug if it comes back"
            )
        self._is_filled = True
        self._target.load_weights(self._own, version)
        return SyncReport(version=version, num_tensors=len(held), bytes_copied=self._bytes, checksum=combined(held))


BUCKET_BYTES = 1 << 26
"""Tensors that an engine gets in one call: enough that calls cost nothing, and little beside a model."""


class StreamTarget(Protocol):
    """An engine with its own weights, as a push sees it; it refuses requests until the push has ended."""

    @property
    def has_weights(self) -> bool:
        """True if it holds all weights, so that a push may bring only changed weights."""
        ...

    def begin_push(self, shapes: Mapping[str, Shape]) -> None:
        """Prepare for weights of these names and shapes; EngineError, and nothing changed, if they do not match."""
        ...

    def take_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load some of them."""
        ...

    def finish_push(self, version: int) -> None:
        """Compare what is held now with what was sent, and empty all caches made with older weights.

        EngineError for a value that differs.
        """
        ...


class EngineStream:
    """The `WeightTaker` of such an engine in this process, which keeps no more than a bucket beside its weights."""

    def __init__(self, target: StreamTarget) -> None:
        self._target = target
        self._bucket: list[tuple[str, Tensor]] = []
        self._bucket_bytes = 0
        self._arrived: dict[str, Tensor] = {}
        """Hashes of the tensors of this push."""
        self._bytes = 0

    @property
    def needs_all(self) -> bool:
        return not self._target.has_weights

    def begin(self, shapes: Mapping[str, Shape]) -> None:
        self._bucket, self._bucket_bytes, self._arrived, self._bytes = [], 0, {}, 0
        self._target.begin_push(shapes)

    def take(self, name: str, tensor: Tensor) -> None:
        self._arrived[name] = bit_hash(tensor)
        self._bucket.append((name, tensor))
        self._bucket_bytes += tensor.nbytes
        if self._bucket_bytes >= BUCKET_BYTES:
            self._flush()

    def finish(self, version: int, sent: Sequence[Tensor]) -> SyncReport:
        if self._bucket:
            self._flush()
        bits = self._checked(sent)
        self._target.finish_push(version)
        return SyncReport(version=version, num_tensors=len(bits), bytes_copied=self._bytes, checksum=combined(bits))

    def _checked(self, sent: Sequence[Tensor]) -> list[int]:
        """The hashes of this push; EngineError where a tensor did not arrive as it was sent."""
        wanted, arrived = read_hashes(sent, list(self._arrived.values()))
        differing = [name for name, one, other in zip(self._arrived, wanted, arrived, strict=True) if one != other]
        if differing:
            raise EngineError(
                f"the weight {differing[0]} arrived with other bits than were sent; run again, and report this as a "
                "bug if it comes back"
            )
        return wanted

    def _flush(self) -> None:
        self._target.take_weights(self._bucket)
        self._bytes += self._bucket_bytes
        self._bucket, self._bucket_bytes = [], 0
