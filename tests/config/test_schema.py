"""The JSON schema of recipes, by which an editor completes and checks them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.cli.texts import SCHEMA_COMMENT
from fovea.config.recipes import read_recipe, read_yaml, recipes_folder
from gym_tests.tables import table

ROOT = Path(__file__).parents[2]
SCHEMA = recipes_folder() / "recipe.schema.json"
RECIPES = [*sorted(recipes_folder().rglob("*.yaml")), ROOT / "examples" / "browser.yaml"]


def complaints(recipe: Any) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return [f"{each.json_path}: {each.message}" for each in jsonschema.Draft202012Validator(schema).iter_errors(recipe)]


def test_the_file_beside_the_recipes_is_what_the_command_prints() -> None:
    printed = CliRunner().invoke(app, ["config", "--schema"])
    told = "write it again: fovea config --schema > recipes/recipe.schema.json"
    assert printed.stdout == SCHEMA.read_text(encoding="utf-8"), told
    both = CliRunner().invoke(app, ["config", "--schema", "shapes"])
    assert (both.exit_code, "leave one out" in both.stderr) == (2, True)


@table("recipe", RECIPES)
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
