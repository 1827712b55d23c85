"""The order of training rows: seeded, weighted by kind and level, and resumable to the row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from fovea_gym.errors import ConfigError, DataError

# Kinds are sampled in blocks, each with a separate generator, so that one number stores the position.
_BLOCK = 4096
_KIND_STREAM, _ROW_STREAM = 0, 1
_LEVEL_SETTING = "curriculum.level_weights"


class OrderState(TypedDict):
    """The state of an order in a checkpoint; JSON-serialisable."""

    num_sampled: int
    num_sampled_of_kind: dict[str, int]
    num_rows_of_kind: dict[str, int]


class Order:
    """An endless sequence of row numbers, sampled by kind.

    Each row's kind is random, with a probability proportional to (rows of that kind x its weight). The rows of one kind
    come in shuffled order without repetition until all have been used; then they are shuffled again. The order does not
    depend on how many rows are taken at once. With levels, each pair of a kind and a level (`counting/hard`) is sampled
    like a separate kind, with the weight of its kind times that of its level.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        *,
        weights: Mapping[str, float],
        seed: int,
        setting: str = "data.kind_weights",
        levels: Sequence[str] | None = None,
    ) -> None:
        if not kinds:
            raise DataError("there are no rows; give the data set at least one row")
        _check_names(weights, sorted(set(kinds)), setting, "kind")
        for name, weight in weights.items():
            if not weight > 0:
                raise ConfigError(f"{setting}: {name} has weight {weight:g} and would never be sampled; set it above 0")
        strata = [(kind, "") for kind in kinds] if levels is None else list(zip(kinds, levels, strict=True))
        counts = Counter(strata)
        self._strata = sorted(counts)
        self._names = [f"{kind}/{level}" if level else kind for kind, level in self._strata]
        number = {stratum: index for index, stratum in enumerate(self._strata)}
        stratum_of_row = np.array([number[stratum] for stratum in strata])
        self._rows = [np.flatnonzero(stratum_of_row == index) for index in range(len(self._strata))]
        self._shares = np.array([counts[each] * weights.get(each[0], 1.0) for each in self._strata])
        self._bounds = np.cumsum(self._shares / self._shares.sum())[:-1]
        self._seed = seed
        self._num_sampled = 0
        self._num_sampled_of_kind = [0] * len(self._names)
        self._kind_blocks: dict[int, NDArray[np.int64]] = {}
        self._shuffles: dict[int, tuple[int, NDArray[np.int64]]] = {}

    def take(self, n: int) -> list[int]:
        """Return the numbers of the next n rows."""
        kinds = self._next_kinds(n)
        rows = np.empty(n, dtype=np.int64)
        for kind in range(len(self._names)):
            places = np.flatnonzero(kinds == kind)
            rows[places] = self._next_rows(kind, len(places))
        self._num_sampled += n
        taken: list[int] = rows.tolist()
        return taken

    def rest(self) -> None:
        """Return None, since this order never ends."""

    def weigh_levels(self, weights: Mapping[str, float]) -> None:
        """Weight the levels of all later rows, relative to their share of the rows (default 1; 0 excludes a level)."""
        levels = sorted({level for _, level in self._strata if level})
        if weights and not levels:
            raise ConfigError(f"{_LEVEL_SETTING} is set, but the rows have no levels; remove it")
        _check_names(weights, levels, _LEVEL_SETTING, "level")
        shares = self._shares * [weights.get(level, 1.0) for _, level in self._strata]
        if not shares.sum() > 0:
            raise ConfigError(
                f"{_LEVEL_SETTING}={dict(weights)} leaves no row to sample; give one of {', '.join(levels)} a weight"
            )
        ends = np.cumsum(shares)
        self._bounds = (ends / ends[-1])[:-1]
        self._kind_blocks.clear()  # sampled with the previous weights

    def state(self) -> OrderState:
        """Return the position, whose size does not grow with the number of rows."""
        return {
            "num_sampled": self._num_sampled,
            "num_sampled_of_kind": dict(zip(self._names, self._num_sampled_of_kind, strict=True)),
            "num_rows_of_kind": self._num_rows_of_kind(),
        }

    def restore(self, state: OrderState) -> None:
        """Continue from a position; DataError if the rows differ from those of the order that returned it."""
        if "num_rows" in state:
            raise DataError("the run began with max_epochs, or data.shuffle=false; resume it in the same way")
        saved, found = state["num_rows_of_kind"], self._num_rows_of_kind()
        if saved != found:
            raise DataError(
                f"the saved order is of rows {saved}, but the data have {found}, so it cannot continue; "
                "resume with the data files that the run began with"
            )
        self._num_sampled = state["num_sampled"]
        self._num_sampled_of_kind = [state["num_sampled_of_kind"][name] for name in self._names]

    def _num_rows_of_kind(self) -> dict[str, int]:
        return {name: len(rows) for name, rows in zip(self._names, self._rows, strict=True)}

    def _next_kinds(self, n: int) -> NDArray[np.int64]:
        first, last = self._num_sampled // _BLOCK, (self._num_sampled + n) // _BLOCK
        blocks = {block: self._kind_block(block) for block in range(first, last + 1)}
        self._kind_blocks = {last: blocks[last]}
        start = self._num_sampled - first * _BLOCK
        return np.concatenate(list(blocks.values()))[start : start + n]

    def _kind_block(self, block: int) -> NDArray[np.int64]:
        if block in self._kind_blocks:
            return self._kind_blocks[block]
        draws = np.random.default_rng([self._seed, _KIND_STREAM, block]).random(_BLOCK)
        return np.searchsorted(self._bounds, draws, side="right").astype(np.int64)

    def _next_rows(self, kind: int, n: int) -> NDArray[np.int64]:
        taken: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
        while n > 0:
            epoch, start = divmod(self._num_sampled_of_kind[kind], len(self._rows[kind]))
            taken.append(self._shuffled(kind, epoch)[start : start + n])
            self._num_sampled_of_kind[kind] += len(taken[-1])
            n -= len(taken[-1])
        return np.concatenate(taken)

    def _shuffled(self, kind: int, epoch: int) -> NDArray[np.int64]:
        known = self._shuffles.get(kind)
        if known is None or known[0] != epoch:
            generator = np.random.default_rng([self._seed, _ROW_STREAM, kind, epoch])
            known = self._shuffles[kind] = (epoch, generator.permutation(self._rows[kind]))
        return known[1]


def _check_names(weights: Mapping[str, float], names: Sequence[str], setting: str, what: str) -> None:
    for name in weights:
        if name not in names:
            raise ConfigError(f"{setting} names {name!r}, but no row has that {what}; use one of {', '.join(names)}")


_EPOCH_STREAM = 2
"""A stream of random numbers separate from those of `Order`."""


class RowOrder(Protocol):
    """The sequence of the numbers of the rows that a run trains on: `EpochOrder` or `Order`."""

    def take(self, n: int) -> list[int]:
        """Return the numbers of the next n rows; fewer at the end of a finite order."""
        ...

    def rest(self) -> Iterator[int] | None:
        """The remaining rows, without taking them; None if the order never ends."""
        ...

    def weigh_levels(self, weights: Mapping[str, float]) -> None:
        """Weight the levels of all later rows; ConfigError if the order does not use weights."""
        ...

    def state(self) -> Any:
        """Return the position; JSON-serialisable."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from a position; DataError if it is of other rows, ConfigError if a finite order ends before it."""
        ...


class EpochState(TypedDict):
    """The state of an order of epochs in a checkpoint; JSON-serialisable."""

    num_sampled: int
    num_rows: int


class EpochOrder:
    """The rows 0 to num_rows - 1, each exactly once per epoch; without `max_epochs` the order never ends."""

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool, max_epochs: int | None = None) -> None:
        if not num_rows:
            raise DataError("there are no rows; give the data set at least one row")
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._end = None if max_epochs is None else max_epochs * num_rows
        self._num_sampled = 0

    def take(self, n: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < n and self._num_sampled != self._end:
            epoch, start = divmod(self._num_sampled, self._num_rows)
            rows = self._epoch(epoch)[start : start + n - len(taken)].tolist()
            self._num_sampled += len(rows)
            taken += rows
        return taken

    def rest(self) -> Iterator[int] | None:
        if self._end is None:
            return None
        ahead = range(self._num_sampled, self._end)
        return (int(self._epoch(drawn // self._num_rows)[drawn % self._num_rows]) for drawn in ahead)

    def weigh_levels(self, weights: Mapping[str, float]) -> None:
        if weights:
            raise ConfigError("curriculum.level_weights is set, but an epoch has each row exactly once; remove either")

    def state(self) -> EpochState:
        return {"num_sampled": self._num_sampled, "num_rows": self._num_rows}

    def restore(self, state: EpochState) -> None:
        if "num_rows_of_kind" in state:
            raise DataError("the run began without max_epochs and with data.shuffle=true; resume it in the same way")
        if state["num_rows"] != self._num_rows:
            raise DataError(
                f"the saved order is of {state['num_rows']} rows, but the data have {self._num_rows}, so it cannot "
                "continue; resume with the data files that the run began with"
            )
        if self._end is not None and state["num_sampled"] > self._end:
            raise ConfigError(
                f"max_epochs={self._end // self._num_rows}, but the run has already used {state['num_sampled']} rows "
                f"(an epoch has {self._num_rows}), so nothing is left to train on; set a larger max_epochs, or use the "
                "run as it is (fovea eval, fovea export)"
            )
        self._num_sampled = state["num_sampled"]

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._num_rows)
        return np.random.default_rng([self._seed, _EPOCH_STREAM, epoch]).permutation(self._num_rows)
