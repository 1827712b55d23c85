"""Calls for another start of a server, which had other weights."""

from __future__ import annotations

import pytest

from fovea.rollout.server_start import START_ENV, SameStart
from tests.rollout.asgi_calls import status


@pytest.mark.parametrize(
    ("headers", "expected"), [({"x_fovea_start": "second"}, 200), ({"x_fovea_start": "first"}, 409), ({}, 200)]
)
def test_a_call_for_an_earlier_start_is_refused(
    headers: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(START_ENV, "second")
    assert status(SameStart, "/inference/v1/generate", **headers) == expected
