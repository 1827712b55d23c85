"""A run's samples in TensorBoard: the pictures of its rows, within the bounds that the settings give."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fovea
from fovea.run import recorded
from tests.api.small import PHOTOS, SETTINGS, picture, rows, score


def test_the_pictures_of_a_run_are_in_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = rows()
    for row in given[::2]:
        row["photo"] = row["photo"].resize((64, 64))
    log = {"tensorboard": True, "progress": False, "samples_every_steps": 2, "samples_groups": 1}
    settings = {**SETTINGS, "run_dir": "run", "log": log}
    monkeypatch.setattr(recorded, "TRACKER_MAX_PIXELS", 32 * 32)
    run = fovea.GRPO(rows=given, reward=score, environment=PHOTOS, settings=settings).train()
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("reward")] == pytest.approx([row["reward"] for row in run.metrics])
    assert events.Tags()["images"] == ["samples/1"], "log.samples_groups"
    images, texts = events.Images("samples/1"), events.Tensors("samples/1/text_summary")
    assert [image.step for image in images] == [text.step for text in texts] == [1, 2]
    for image, text in zip(images, texts, strict=True):
        question, truth, reward = text.tensor_proto.string_val[0].decode().split("\n", 2)
        shown = Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB")
        assert shown.size == (32, 32)
        np.testing.assert_array_equal(np.asarray(shown), np.asarray(picture(truth.removeprefix("    truth: "))))
        assert question.strip() in {row["question"] for row in given}
        assert reward.startswith("    reward ")
