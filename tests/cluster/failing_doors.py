"""An environment whose sessions often fail: `environment=tests/cluster/failing_doors.py:FailingDoors`."""

from __future__ import annotations

from tests.test_failed_sessions import Doors


class FailingDoors(Doors):
    """Three of four sessions fail, and the demonstrations of seven of eight rows."""

    def __init__(self) -> None:
        super().__init__(failing=3, demonstrated=7)
