"""Measurement of the pushes of weights."""

from __future__ import annotations

from time import perf_counter

from fovea.cluster.weights import SyncReport, WeightSync
from fovea.types import Metrics


class MeasuredSync:
    """A weight sync that remembers what its last push took."""

    def __init__(self, sync: WeightSync) -> None:
        self._sync = sync
        self.metrics: Metrics = {}
        """Metrics of the last push; empty before the first."""

    async def push(self, version: int) -> SyncReport:
        started = perf_counter()
        report = await self._sync.push(version)
        self.metrics = {
            "seconds/push": perf_counter() - started,
            "transfer/weights_mib": report.bytes_copied / 2**20,
        }
        if report.checksum is not None:
            self.metrics["weights_checksum"] = float(report.checksum)
        return report
