"""The rows that all targets are asked are read as a run reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fovea.commands.evaluate import EvalSet, OutputFiles, evaluate_targets
from fovea.config.recipes import shipped_recipe
from fovea.config.run import Config
from fovea.errors import ConfigError
from fovea.utils import http_json
from tests.bad_files import encoded, picture
from tests.data.web import served


def test_images_are_fetched_and_converted_as_the_settings_say(tmp_path: Path) -> None:
    printed = encoded(picture(1).convert("CMYK"), "JPEG")
    with served({"/printed.jpg": printed}) as site:
        row = {"problem": "<image>Find x.", "images": [f"{site.url}/printed.jpg"], "answer": "3"}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        files = [str(tmp_path / "rows.jsonl")]
        config = Config.model_validate(
            {
                "model": {"tiny": {}},
                "run_dir": str(tmp_path / "run"),
                "environment": {"name": "geo3k", "train_files": files, "test_files": files},
                "data": {"allow_private_addresses": True, "convert_images": ["cmyk"]},
            }
        )
        rows = EvalSet.of(config, "test")
        images = [rows.open_image(rows.tasks[0].images[0]) for _ in range(2)]
    assert [image.mode for image in images] == ["RGB", "RGB"]
    assert site.asked == ["/printed.jpg"], "a run keeps what a URL has sent"


def test_servers_are_asked_before_any_row_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> EvalSet:
        raise AssertionError("rows were read first")

    monkeypatch.setattr(http_json, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(EvalSet, "of", read)
    targets = ["gold", "http://127.0.0.1:9"]
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9: no OpenAI-compatible server answers there"):
        evaluate_targets(
            targets, [], recipe=shipped_recipe("shapes"), split="test", output_files=OutputFiles(), quiet=True
        )
