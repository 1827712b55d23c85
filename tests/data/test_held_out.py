"""Runs that read dev rows need some."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fovea.config.run import Config


@pytest.mark.parametrize("reader", [{"evaluate": {"every_steps": 5}}, {"warmup": {}}])
def test_readers_of_dev_need_dev_rows(reader: dict[str, object]) -> None:
    files = {"name": "vqa", "train_files": ["a"], "test_files": ["b"], "dev_share": 0}
    with pytest.raises(ValidationError, match=r"\benvironment\.dev_share=0\b"):
        Config.model_validate({"model": {"tiny": {}}, "environment": files, **reader})
    Config.model_validate({"model": {"tiny": {}}, "environment": {**files, "dev_files": ["c"]}, **reader})
