"""Every row once in each epoch: shuffled anew for each of them, or in the order of the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from fovea.errors import ConfigError, DataError

_EPOCH_STREAM = 2
"""Random numbers apart from those of `order.Order`."""


class RowOrder(Protocol):
    """The numbers of the rows that a run trains on, one after the other: `EpochOrder` or `order.Order`."""

    def take(self, n: int) -> list[int]:
        """Return the numbers of the next n rows; fewer, or none, at the end of an order that ends."""
        ...

    def rest(self) -> Iterator[int] | None:
        """The rows that are still to come, without taking them; None where they never end."""
        ...

    def weigh_levels(self, weights: Mapping[str, float]) -> None:
        """Weight the levels of all later draws; ConfigError where the order draws by no weights."""
        ...

    def state(self) -> Any:
        """Return the position; JSON-serialisable."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from a position; DataError unless the rows are those of the order that returned it.

        ConfigError where an order that ends does so before the position.
        """
        ...


class EpochState(TypedDict):
    """The state of an order of epochs in a checkpoint; JSON-serialisable."""

    num_drawn: int
    num_rows: int


class EpochOrder:
    """The rows 0 to num_rows - 1, each exactly once in every epoch; without `max_epochs` it never ends.

    How many are taken at once does not change the order.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool, max_epochs: int | None = None) -> None:
        if not num_rows:
            raise DataError("there are no rows to draw from; give the data set at least one row")
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._end = None if max_epochs is None else max_epochs * num_rows
        self._num_drawn = 0

    def take(self, n: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < n and self._num_drawn != self._end:
            epoch, start = divmod(self._num_drawn, self._num_rows)
            rows = self._epoch(epoch)[start : start + n - len(taken)].tolist()
            self._num_drawn += len(rows)
            taken += rows
        return taken

    def rest(self) -> Iterator[int] | None:
        if self._end is None:
            return None
        ahead = range(self._num_drawn, self._end)
        return (int(self._epoch(drawn // self._num_rows)[drawn % self._num_rows]) for drawn in ahead)

    def weigh_levels(self, weights: Mapping[str, float]) -> None:
        if weights:
            raise ConfigError("curriculum.level_weights draws rows by weight, and an epoch has each once; drop either")

    def state(self) -> EpochState:
        return {"num_drawn": self._num_drawn, "num_rows": self._num_rows}

    def restore(self, state: EpochState) -> None:
        if "num_rows_of_kind" in state:
            raise DataError("the run began without max_epochs and with data.shuffle=true; resume it in the same way")
        if state["num_rows"] != self._num_rows:
            raise DataError(
                f"the saved order is of {state['num_rows']} rows, but the data have {self._num_rows}, so it cannot go "
                "on; resume with the data files the run began with"
            )
        if self._end is not None and state["num_drawn"] > self._end:
            raise ConfigError(
                f"max_epochs={self._end // self._num_rows}, but the run has drawn {state['num_drawn']} times from its "
                f"{self._num_rows} rows, so nothing is left to train; set a larger max_epochs, or use it as it is "
                "(fovea eval, fovea export)"
            )
        self._num_drawn = state["num_drawn"]

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._num_rows)
        return np.random.default_rng([self._seed, _EPOCH_STREAM, epoch]).permutation(self._num_rows)
