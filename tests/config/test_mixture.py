"""Settings of a mixture: the settings of any environment, below the names of parts that the user chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.config.describe import describe
from fovea.config.loading import dump_config, keys_of, load_config
from fovea.config.run import Config
from fovea_gym.errors import ConfigError
from fovea_gym.settings.environments import Geo3kEnvironment, MixtureEnvironment, OwnEnvironment, ShapesEnvironment
from gym_tests.tables import table

RECIPE = """
model: {tiny: {}}
environment:
  name: mixture
  parts:
    geometry: {share: 3, environment: {name: geo3k, train_files: [a], test_files: [b]}}
    scenes: {}
"""
GEOMETRY, SCENES = "environment.parts.geometry", "environment.parts.scenes"


def load(folder: Path, *overrides: str) -> Config:
    (folder / "mixed.yaml").write_text(RECIPE)
    return load_config([folder / "mixed.yaml"], overrides)


def test_parts_have_the_settings_of_any_environment(tmp_path: Path) -> None:
    config = load(tmp_path, f"{GEOMETRY}.environment.think_tags=true", f"{SCENES}.share=0.5")
    assert isinstance(config.environment, MixtureEnvironment)
    shares = {name: part.share for name, part in config.environment.parts.by_name.items()}
    assert shares == {"geometry": 3, "scenes": 0.5}
    assert config.environments == {
        f"{GEOMETRY}.environment": Geo3kEnvironment(train_files=("a",), test_files=("b",), think_tags=True),
        f"{SCENES}.environment": ShapesEnvironment(),
    }
    (tmp_path / "all.yaml").write_text(dump_config(config))
    assert load_config([tmp_path / "all.yaml"], []) == config


def test_an_override_may_add_a_part(tmp_path: Path) -> None:
    for override in (".environment=shapes", "={environment: {name: shapes}}"):
        added = load(tmp_path, f"environment.parts.more{override}", "environment.parts.more.share=4").environment
        assert isinstance(added, MixtureEnvironment)
        assert added.parts.by_name["more"].share == 4


def test_short_forms_of_parts(tmp_path: Path) -> None:
    # the choice of an environment comes before its settings, wherever it is written
    files = [f"{SCENES}.environment.{split}_files=[x]" for split in ("train", "test")]
    config = load(tmp_path, *files, f"{SCENES}.environment=vqa", f"{GEOMETRY}.environment=mine.py:Class")
    geometry, scenes = config.environments.values()
    assert geometry == OwnEnvironment(file="mine.py:Class")
    assert scenes.name == "vqa"
    assert load_config([], ["model.tiny={}", f"{SCENES}.share=2", "environment=mixture"]).environments == {
        f"{SCENES}.environment": ShapesEnvironment()
    }


@table(
    ("override", "message"),
    [
        (f"{GEOMETRY}.shar=2", r"geometry\.shar: no such setting; did you mean environment\.parts\.PART\.share\?"),
        (f"{GEOMETRY}.environment.train_filez=[a]", r"train_filez: no such .* mean environment\.train_files\?"),
        (f"{GEOMETRY}.environment.image_side_px=48", r"geometry: environment\.image_side_px: a setting of .*=shapes"),
        (f"{SCENES}.environment.image_side_px=x", r'scenes\.environment\.image_side_px: "x" .*allowed: integer >= 32'),
        (f"{SCENES}.environment=vqa", r"scenes\.environment\.train_files: must be set; allowed: list of text"),
        (f"{SCENES}.environment=mixture", r'environment\.name: "mixture" does not fit; allowed: shapes \|'),
        (f"{SCENES}.environment={{level: [1, 1]}}", r"environment\.parts\.scenes: environment\.level=\[1, 1\] names"),
        ("environment.parts.scene.share=2", r"scene: no such part; .*\.name would add one; did you mean .*\.scenes\?"),
        ("environment.parts.other.environment.level=2", r"other: no such part; .*\.environment\.name would add one"),
        (f"{GEOMETRY}.share=0", r"geometry\.share: 0 does not fit; allowed: number > 0"),
        ("environment.parts={a/b: {}}", r"'a/b' cannot be part of the names"),
        ("environment.parts=null", r"environment\.parts: null does not fit"),
        ("max_epochs=2", r"max_epochs=2 uses every row once per epoch, but environment\.name=mixture samples"),
        ("data.shuffle=false", r"data\.shuffle=false uses every row once per epoch, but environment\.name=mixture"),
        ("second_opinion=wrong", r"second_opinion overrules .*; set second_opinion="),
        ("evaluate.every_steps=5", r"geometry\.environment\.dev_share=0 leaves no dev rows"),
    ],
)
def test_what_a_mixture_cannot_have(override: str, message: str, tmp_path: Path) -> None:
    no_dev = [f"{GEOMETRY}.environment.dev_share=0"] if "every_steps" in override else []
    with pytest.raises(ConfigError, match=message) as told:
        load(tmp_path, override, *no_dev)
    assert "\n" not in str(told.value)


def test_a_reward_that_would_never_be_asked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\benvironment\.parts\.geometry\.reward\b"):
        load(tmp_path, "reward=a.py:f", f"{GEOMETRY}.reward=b.py:g")
    assert load(tmp_path, f"{GEOMETRY}.reward=b.py:g").rewards == {f"{GEOMETRY}.reward": ("b.py:g",)}


def test_parts_without_a_mixture() -> None:
    for words, told in (
        ([f"{GEOMETRY}.environment.train_files=[a]"], "parts: a setting of environment.name=mixture only"),
        (["environment=mixture", "environment.parts={}"], "parts is empty"),
    ):
        with pytest.raises(ConfigError, match=rf"environment\.{told}"):
            load_config([], ["model.tiny={}", *words])


def test_overrides_that_name_code_in_a_part() -> None:
    named = keys_of([f"{GEOMETRY}.environment=a.py:C", "environment.parts={b: {environment: b.py:D, reward: c.py:f}}"])
    of_b = {"environment.parts.b.environment.file", "environment.parts.b.reward"}
    assert {f"{GEOMETRY}.environment.file", *of_b} < named
    assert keys_of([f"{GEOMETRY}.share=2"]) == {f"{GEOMETRY}.share"}
    # an alias, and the name of a section, that several members of a union may have
    assert keys_of(["algorithm.loss.clip_epsilon=1"]) == {"algorithm.loss.clip_low", "algorithm.loss.clip_high"}
    assert keys_of([f"{GEOMETRY}.environment=vqa"]) == {f"{GEOMETRY}.environment.name"}
    own = {"environment.name", "environment.file", "reward", "seed"}
    assert keys_of(["environment=a.py:C", "reward=b.py:f", "seed=1"]) == own
    assert "environment.file" not in keys_of(["environment.name=own", "environment.settings.x=1"])


def test_descriptions_of_parts() -> None:
    parts = describe("environment.parts")
    keys = [each.key.removeprefix("environment.parts.PART.") for each in parts]
    assert keys == ["share", "environment", "reward"]
    assert describe(f"{GEOMETRY}.share") == parts[:1]
    assert describe(f"{GEOMETRY}.environment.train_files") == describe("environment.train_files")
