"""A model folder that one version of transformers wrote is the same model to the other: there and back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.train.megatron.model_folder import FAMILIES, VERSION_4, VERSION_5, run_module


def test_the_environments_have_both_versions() -> None:
    code = "from importlib.metadata import version; print(version('transformers'))"
    old, new = (subprocess.check_output([python, "-c", code], text=True) for python in (VERSION_4, VERSION_5))
    assert old.startswith("4.57.")
    assert new.startswith("5.")


@pytest.mark.parametrize("writer", [VERSION_4, VERSION_5], ids=["written-by-4", "written-by-5"])
def test_both_versions_read_the_same_model(writer: Path, tmp_path: Path) -> None:
    folder, by_old, by_new = (tmp_path / name for name in ("models", "by-4", "by-5"))
    for each in (folder, by_old, by_new):
        each.mkdir()
    run_module(writer, "write", folder)
    run_module(VERSION_4, "read", folder, by_old)
    run_module(VERSION_5, "read", folder, by_new)
    for family in FAMILIES:
        old, new = (np.load(out / f"{family}.npz") for out in (by_old, by_new))
        for name in ("token_ids", "images", "positions"):
            np.testing.assert_array_equal(old[name], new[name], err_msg=f"{name} of {family}")
        np.testing.assert_allclose(old["logprobs"], new["logprobs"], atol=1e-5, rtol=0, err_msg=family)
