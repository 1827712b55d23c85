"""Calls of the driver, which are forwarded to the processes of a policy by name."""

from __future__ import annotations

import inspect
from typing import Any, cast

import pytest

from fovea.cluster.services import WorkersPolicy
from fovea.train.base import CALLS, Policy
from fovea.train.local import LocalPolicy
from fovea.train.update import TrainedPolicy


def test_each_call_is_a_method_of_a_process_with_the_same_signature() -> None:
    assert {"compute_logprobs", "update", "save", "export"} <= CALLS
    for name in CALLS:
        assert inspect.signature(getattr(TrainedPolicy, name)) == inspect.signature(getattr(Policy, name)), name


@pytest.mark.parametrize("forwards", [LocalPolicy, WorkersPolicy])
def test_what_a_forwarder_writes_out_has_the_signature_of_the_policy(forwards: type) -> None:
    written = vars(forwards).keys() & {*CALLS, "describe", "close"}
    assert len(written) > 2
    for name in written:
        ours, asked = (list(inspect.signature(getattr(each, name)).parameters) for each in (forwards, Policy))
        assert ours == asked, name


@pytest.mark.parametrize("forwards", [LocalPolicy, lambda policy: WorkersPolicy(policy, cast(Any, None))])
def test_nothing_else_is_forwarded(forwards: Any) -> None:
    for name in ("logprobs", "_optimizers", "weights_to_sync", "sfft"):
        with pytest.raises(AttributeError, match=f"a policy has no call {name}"):
            getattr(forwards(cast(Any, None)), name)
