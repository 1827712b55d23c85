"""The list of settings, as `fovea config` and the pages of the reference show it."""

from __future__ import annotations

import pytest

from fovea.config.describe import describe
from fovea.errors import ConfigError
from tests.tables import table


def test_every_setting_is_described() -> None:
    described = describe()
    assert len({(setting.key, setting.doc) for setting in described}) == len(described)
    assert [setting.key for setting in described if not setting.doc.strip()] == []


@table(
    ("key", "type_text", "default"),
    [
        ("seed", "integer >= 0 and < 4294967296", "0"),
        ("run_dir", "text", "runs/{name}-{time}"),
        ("rollout.top_p", "number > 0 and <= 1", "1.0"),
        ("model.lora", "group of settings or null", "null"),
        ("model.lora.rank", "integer >= 1", "16"),
        ("model.dtype", "float32 | bfloat16", "float32"),
        ("train.betas", "list of 2, each number >= 0 and < 1", "[0.9, 0.95]"),
        ("rollout.stop", "list of text", "[]"),
        ("data.kind_weights", "mapping of text to number > 0", "{}"),
        ("algorithm.loss.dual_clip", "number > 1 or null", "3.0"),
        ("environment.name", "shapes | shapes_zoom | geo3k | vqa | caption | rows | geospot | own | mixture", "shapes"),
        ("environment.train_files", "list of text", "must be set"),
    ],
)
def test_a_description(key: str, type_text: str, default: str) -> None:
    (setting,) = [setting for setting in describe(key) if setting.key == key]
    assert (setting.type, setting.default) == (type_text, default)


def test_settings_of_one_variant_say_so() -> None:
    (setting,) = describe("environment.level")
    assert setting.doc.startswith("[environment.name=shapes | shapes_zoom] Difficulty. 1: one kind of object")
    (shared,) = describe("environment.train_files")
    assert shared.doc.startswith("[environment.name=geo3k | vqa | caption | rows | geospot] ")


def test_choices_are_whole_sentences() -> None:
    (engine,) = [setting for setting in describe("rollout.engine") if setting.key == "rollout.engine.name"]
    assert " is pushed to (extra: vllm). vllm_servers: vLLM servers of " in engine.doc
    assert [setting.key for setting in describe() if setting.doc[-1] not in ".`)"] == []


def test_a_prefix_is_whole_words() -> None:
    assert all(setting.key.startswith("model.lora") for setting in describe("model.lora"))
    with pytest.raises(ConfigError, match=r"rollou: no such setting; did you mean rollout\?"):
        describe("rollou")
