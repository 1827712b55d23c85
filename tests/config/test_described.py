"""The list of settings, the JSON schema of recipes, and settings that are written and come back."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.cli.texts import SCHEMA_COMMENT
from fovea.config.describe import describe
from fovea.config.loading import dump_config, load_config
from fovea.config.model import Model, TinyModel
from fovea.config.recipes import parse_override, read_recipe, read_yaml, recipes_folder
from fovea.config.run import Config
from fovea.config.sections import Rollout
from fovea_gym.errors import ConfigError
from gym_tests.tables import table

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
TINY = Config(model=Model(tiny=TinyModel()))


@table("path", RECIPES)
def test_every_recipe_parses_and_comes_back(path: Path, tmp_path: Path) -> None:
    config = load_config([path], [])
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config([tmp_path / "config.yaml"], []) == config


def test_a_dump_is_whole_in_order_and_keeps_texts_that_look_like_numbers() -> None:
    tree = yaml.safe_load(dump_config(TINY))
    assert (list(tree), list(tree["rollout"])) == (list(Config.model_fields), list(Rollout.model_fields))
    config = Config(model=Model(path="1e-6"), run_dir="2026-11-21", rollout=Rollout(stop=("yes", "007", "1:30", "08")))
    assert Config.model_validate(parse_override(f"x={dump_config(config)}")["x"]) == config


@settings(max_examples=50, deadline=None)
@given(
    run_dir=st.text(min_size=1),
    stop=st.lists(st.text(min_size=1)),
    weights=st.dictionaries(st.text(), st.floats(min_value=1e-300, allow_infinity=False)),
    learning_rate=st.floats(min_value=1e-300, max_value=100),
)
def test_any_config_comes_back(run_dir: str, stop: list[str], weights: dict[str, float], learning_rate: float) -> None:
    settings = {"run_dir": run_dir, "model": {"path": run_dir}, "rollout": {"stop": stop}}
    more = {"data": {"kind_weights": weights}, "train": {"learning_rate": learning_rate}}
    config = Config.model_validate(settings | more)
    assert Config.model_validate(parse_override(f"x={dump_config(config)}")["x"]) == config


def test_every_setting_is_described_in_whole_sentences_with_its_variants() -> None:
    described = describe()
    assert len({(setting.key, setting.doc) for setting in described}) == len(described)
    assert [setting.key for setting in described if not setting.doc.strip()] == []
    (setting,) = describe("environment.zoom")
    assert setting.doc.startswith("[environment.name=shapes_small] Let the model ask for an enlarged box of the scene")
    (shared,) = describe("environment.train_files")
    assert shared.doc.startswith("[environment.name=geo3k | vqa | caption | rows | geospot | grounding | nemo_gym] ")
    (engine,) = [setting for setting in describe("rollout.engine") if setting.key == "rollout.engine.name"]
    assert " after every update (extra: vllm). vllm_servers: " in engine.doc
    assert [setting.key for setting in describe() if setting.doc[-1] not in ".`)"] == []
    # a prefix is whole words
    assert all(setting.key.startswith("model.lora") for setting in describe("model.lora"))
    with pytest.raises(ConfigError, match=r"rollou: no such setting; did you mean rollout\?"):
        describe("rollou")


@table(
    ("key", "type_text", "default"),
    [
        ("seed", "integer >= 0 and < 4294967296", "0"),
        ("run_dir", "text", "runs/{name}-{time}"),
        ("rollout.top_p", "number > 0 and <= 1", "1.0"),
        ("model.lora", "group of settings or null", "null"),
        ("model.lora.rank", "integer >= 1 and <= 8192", "16"),
        ("model.dtype", "float32 | bfloat16", "float32"),
        ("train.betas", "list of 2, each number >= 0 and < 1", "[0.9, 0.95]"),
        ("rollout.stop", "list of text", "[]"),
        ("data.kind_weights", "mapping of text to number > 0", "{}"),
        ("algorithm.loss.dual_clip", "number > 1 or null", "3.0"),
        (
            "environment.name",
            "shapes | shapes_small | grounding_shapes | geo3k | vqa | caption | rows | geospot | grounding | "
            "gymnasium | openenv | nemo_gym | own | mixture | frozen_lake | pages | shapes_zoom | sokoban",
            "shapes",
        ),
        ("environment.train_files", "list of text", "must be set"),
    ],
)
def test_a_description(key: str, type_text: str, default: str) -> None:
    (setting,) = [setting for setting in describe(key) if setting.key == key]
    assert (setting.type, setting.default) == (type_text, default)


SCHEMA = recipes_folder() / "recipe.schema.json"


@cache
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def complaints(recipe: Any) -> list[str]:
    return [f"{each.json_path}: {each.message}" for each in validator().iter_errors(recipe)]


def test_the_file_beside_the_recipes_is_what_the_command_prints() -> None:
    printed = CliRunner().invoke(app, ["config", "--schema"])
    told = "write it again: fovea config --schema > recipes/recipe.schema.json"
    assert printed.stdout == SCHEMA.read_text(encoding="utf-8"), told
    both = CliRunner().invoke(app, ["config", "--schema", "shapes"])
    assert (both.exit_code, "leave one out" in both.stderr) == (2, True)


@table("recipe", [*RECIPES, ROOT / "examples" / "browser.yaml"])
def test_every_recipe_names_the_schema_and_fits_it(recipe: Path) -> None:
    first = recipe.read_text(encoding="utf-8").splitlines()[0]
    assert first == f"{SCHEMA_COMMENT} $schema={os.path.relpath(SCHEMA, recipe.parent)}"
    assert complaints(read_recipe(recipe)) == []


@table(
    "wrong",
    [
        "{sed: 1}",
        "{rollout: {top_pp: 0.9}}",
        "{rollout: {top_p: 1.5}}",
        "{train: {lr_schedule: cosin}}",
        "{environment: {name: geo3k, trainfiles: [a]}}",
        "{environment: {name: sokoban, side: 50}}",
        "{environment: {name: sokoban, frozen_share: 0.5}}",
        "{rollout: {engine: {name: vllm, gpu_memory_utilization: 2}}}",
        "{rollout: {engine: slwo}}",
        "{train: {backend: {name: megatron, replicas: 2}}}",
        "{environment: {name: mixture, parts: {a: {shre: 1}}}}",
        "{environment: {name: mixture, parts: {a: {environment: {name: shapes, level: 4}}}}}",
        "{algorithm: {loss: {clip_epsilon: 2}}}",
    ],
)
def test_a_misspelt_key_and_a_value_out_of_range_do_not_fit(wrong: str) -> None:
    assert complaints(read_yaml(wrong, "here"))


@table(
    "right",
    [
        "{algorithm: gspo, warmup: true, environment: a.py:C}",
        "{warmup: null, algorithm: {loss: sapo, kl: null}, model: {lora: {targets: all-linear}}}",
        "{environment: {name: mixture, parts: {a: {share: 2, environment: shapes}}}}",
        "{algorithm: {loss: {clip_epsilon: 0.1}}, environment: {level: 2}, rollout: {engine: vllm}}",
    ],
)
def test_short_forms_fit(right: str) -> None:
    assert complaints(read_yaml(right, "here")) == []


def test_an_editor_shows_what_help_says() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    top_p = schema["$defs"]["Rollout"]["properties"]["top_p"]
    told = "Nucleus sampling: keep the smallest set of tokens with this much probability."
    assert top_p == {"default": 1.0, "description": told, "exclusiveMinimum": 0, "maximum": 1, "type": "number"}
