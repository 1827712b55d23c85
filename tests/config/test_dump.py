"""Settings that are written come back: every recipe, every value, and in the order of the sections."""

from __future__ import annotations

from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.config.loading import dump_config, load_config
from fovea.config.model import Model, TinyModel
from fovea.config.recipes import parse_override
from fovea.config.run import Config
from fovea.config.sections import Rollout
from tests.tables import table

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
TINY = Config(model=Model(tiny=TinyModel()))


@table("path", RECIPES)
def test_every_recipe_parses_and_comes_back(path: Path, tmp_path: Path) -> None:
    config = load_config([path], [])
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config([tmp_path / "config.yaml"], []) == config


def test_there_are_recipes() -> None:
    assert {path.name for path in RECIPES} >= {"shapes.yaml", "geo3k.yaml"}


def test_a_dump_is_whole_and_in_order() -> None:
    tree = yaml.safe_load(dump_config(TINY))
    assert list(tree) == list(Config.model_fields)
    assert list(tree["rollout"]) == list(Rollout.model_fields)


@settings(max_examples=50, deadline=None)
@given(
    run_dir=st.text(min_size=1),
    stop=st.lists(st.text(min_size=1)),
    weights=st.dictionaries(st.text(), st.floats(min_value=1e-300, allow_infinity=False)),
    learning_rate=st.floats(min_value=1e-300, allow_infinity=False),
)
def test_any_config_comes_back(run_dir: str, stop: list[str], weights: dict[str, float], learning_rate: float) -> None:
    config = Config.model_validate(
        {
            "run_dir": run_dir,
            "model": {"path": run_dir},
            "rollout": {"stop": stop},
            "data": {"kind_weights": weights},
            "train": {"learning_rate": learning_rate},
        }
    )
    tree = parse_override(f"x={dump_config(config)}")["x"]
    assert Config.model_validate(tree) == config


def test_texts_that_look_like_numbers_come_back() -> None:
    config = Config(model=Model(path="1e-6"), run_dir="2026-11-21", rollout=Rollout(stop=("yes", "007", "1:30", "08")))
    assert Config.model_validate(parse_override(f"x={dump_config(config)}")["x"]) == config


# What loading imports, and a short form
