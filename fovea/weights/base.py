"""Weight sync from the policy to the engines: its protocol, and the checks that every implementation makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fovea.errors import EngineError
from fovea.types import Weights
from fovea.utils.checksum import bit_hash, read_hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Result of one push of weights."""

    version: int
    num_tensors: int
    """Tensors that the push brought; from the second on, only those that training changes."""
    bytes_copied: int
    """Bytes that it brought to each engine; 0 where policy and engine share their tensors."""
    checksum: int | None = None
    """Checksum of what the engine of this worker holds of these tensors, or of what this worker sent to the engines of
    others; None where it did neither. Where nothing is copied, only trained tensors count."""


class WeightSync(Protocol):
    """Transfers the policy's weights to every engine; written for a pair of backends, which do not know each other."""

    async def push(self, version: int) -> SyncReport:
        """Make the engines sample from the policy's current weights, as `version`.

        Afterwards every name has matched on both sides, copies are equal bit for bit, and caches made with older
        weights (prefix, images, decode copies) are empty; EngineError if one of these fails.
        """
        ...


class WeightSource(Protocol):
    """The training side of a weight sync."""

    def weights(self) -> Weights:
        """All weights under their Hugging Face names, adapters beside them.

        Weights that training changes have `requires_grad`; sharded ones are DTensors, which all ranks must gather.
        """
        ...


class WeightTarget(Protocol):
    """The engine's side of a weight sync."""

    @property
    def weight_names(self) -> frozenset[str]:
        """Names of all weights that the engine samples with, as `WeightSource.weights` gives them."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        """Take these weights and empty all caches made with older ones; returns the tensors that it holds now."""
        ...

    def own_weights(self) -> Weights:
        """The tensors of the engine's network, into which a push from elsewhere copies."""
        ...


def check_names(sent: Iterable[str], wanted: Iterable[str]) -> None:
    """Raise EngineError unless the names are the same on both sides."""
    missing, unknown = sorted(set(wanted) - set(sent)), sorted(set(sent) - set(wanted))
    if missing or unknown:
        sides = [f"{len(missing)} that the engine needs were not sent, first {missing[0]}"] if missing else []
        sides += [f"{len(unknown)} that were sent the engine does not have, first {unknown[0]}"] if unknown else []
        raise EngineError(
            f"weights do not match between trainer and engine: {'; '.join(sides)}; both must open the same model: "
            "compare model.path on both sides"
        )


def check_copies(sent: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> int:
    """Compare checksums of copied tensors, and return their bytes; EngineError for one that differs."""
    # others share memory: nothing was copied
    copied = [name for name, tensor in sent.items() if held[name].data_ptr() != tensor.data_ptr()]
    ours = [bit_hash(sent[name].to(held[name].dtype)) for name in copied]
    theirs = [bit_hash(held[name]) for name in copied]
    for name, one, other in zip(copied, *read_hashes(ours, theirs), strict=True):
        if held[name].shape != sent[name].shape or one != other:
            raise EngineError(
                f"the weight {name} differs between trainer and engine after it was copied; run again, and report this "
                "as a bug if it comes back"
            )
    return sum(sent[name].nbytes for name in copied)
