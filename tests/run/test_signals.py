"""Signals that the kernel delivers twice, as the end of torchrun to several threads of a process, are one."""

from __future__ import annotations

import signal

import pytest

from fovea.run.signals import SAME_SIGNAL_SECONDS, Stop


def test_the_end_of_torchrun_may_be_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    now = [100.0]
    monkeypatch.setattr("fovea.run.signals.perf_counter", lambda: now[0])
    stop = Stop(started=0.0)
    with pytest.raises(SystemExit), stop.after_step():  # noqa: PT012 (a stopped run ends with the block)
        for _ in range(2):
            stop.receive(signal.SIGTERM, None)
        assert stop.received is signal.SIGTERM
        now[0] += 2 * SAME_SIGNAL_SECONDS
        with pytest.raises(SystemExit):
            stop.receive(signal.SIGTERM, None)


def test_without_torchrun_a_second_signal_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    stop = Stop()
    with pytest.raises(SystemExit), stop.after_step():  # noqa: PT012 (the same)
        stop.receive(signal.SIGTERM, None)
        with pytest.raises(SystemExit):
            stop.receive(signal.SIGTERM, None)
