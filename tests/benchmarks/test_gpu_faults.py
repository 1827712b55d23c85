"""Faults that are put back: each has one place in the product, and tests that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_faults import FAULTS, Fault, put_back
from benchmarks.mutations import ROOT


def test_every_fault_has_its_place_and_its_test() -> None:
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.before) == 1, fault.name
        file, _, test = fault.tests.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8") or not test, fault.tests


def test_a_fault_is_in_the_copy_within_the_block_only(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\n")
    fault = Fault(name="", file="code.py", before="1", after="2", tests="")
    with put_back(tmp_path, fault):
        assert (tmp_path / "code.py").read_text() == "a = 2\n"
    assert (tmp_path / "code.py").read_text() == "a = 1\n"
    (tmp_path / "code.py").write_text("a = b = 1, 1\n")
    with pytest.raises(ValueError, match=r"code\.py has 2 times: 1"), put_back(tmp_path, fault):
        pass
