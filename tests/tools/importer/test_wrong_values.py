"""Values of wrong types and settings in a circle: left out with the reason or an error in one line, for every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fovea.config.elsewhere import BELOW, systems
from fovea.errors import FoveaError
from fovea.tools.importer.interpolation import Given
from fovea.tools.importer.reading import IMPORTED, read
from fovea.tools.importer.translate import recipe_text, translate
from tests.tools.importer.imports import GEO3K, error_of, imported, resolved
from tests.tools.importer.runs_of_others import RLINF, VERL

ACTOR = "actor_rollout_ref.actor"
VALUES = [None, 0, -1, "abc", [1, 2], [[1]], {"a": 1}, True]
OTHER_BRANCHES = {
    "verl": {"reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 512},
    "rlinf": {"algorithm.adv_type": "gae", "runner.max_steps": 750},
}


@pytest.fixture(autouse=True)
def in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(VERL, encoding="utf-8")
    Path("geo3k.yaml").write_text(RLINF, encoding="utf-8")


def given(settings: dict[str, Any]) -> dict[str, Given]:
    return {key: Given(key=key, value=value, where="here") for key, value in settings.items()}


def error_or_none(name: str, settings: dict[str, Given], *, written: bool) -> FoveaError | None:
    try:
        translation = translate(systems()[name], settings, "geo3k")
        if written:
            recipe_text(translation, [])
    except FoveaError as error:
        return error
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPORTED)
@pytest.mark.parametrize("is_alone", [True, False])
def test_no_value_of_any_key_is_a_traceback(name: str, is_alone: bool) -> None:
    """Every known key with every kind of value, alone and over settings that lead into other branches of the rules."""
    run = {} if is_alone else read(["run.sh" if name == "verl" else "geo3k.yaml"]) | given(OTHER_BRANCHES[name])
    for key in (each.theirs.replace(BELOW, ".any") for each in systems()[name].settings):
        for value in VALUES:
            # writing takes twenty times as long, and reads the values by one check of the settings, whatever the key
            error = error_or_none(name, run | given({key: value}), written=value == {"a": 1})
            assert error is None or "\n" not in str(error), f"{key}={value}"


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["data.train_batch_size=null"], "data.train_batch_size: null is not a positive integer"),
        (["data.train_batch_size=null"], f"{ACTOR}.ppo_mini_batch_size: read together with data.train_batch_size, wh"),
        ([f"{ACTOR}.ppo_mini_batch_size=0"], f"{ACTOR}.ppo_mini_batch_size: 0 is not a positive integer"),
        ([f"{ACTOR}.use_kl_loss=abc"], f'{ACTOR}.use_kl_loss: "abc" is not a boolean or null'),
        ([f"{ACTOR}.optim.lr_scheduler_type=[1]"], f"{ACTOR}.optim.lr_scheduler_type: only "),
        (["trainer.logger=0"], "trainer.logger: 0 is not a text or list of texts or null"),
        (["custom_reward_function.path=[1]"], "custom_reward_function.path: [1] is not a file"),
    ],
)
def test_a_value_of_a_wrong_type_is_left_out(words: list[str], left: str) -> None:
    recipe = imported("run.sh", *words, *GEO3K)
    head, _, _ = recipe.partition("# These need no setting here:")
    assert f"#   {left}" in head
    assert head.count(f"#   {words[0].partition('=')[0]}:") == 1, "told once, whoever reads it"
    assert resolved(recipe)["environment.name"] == "geo3k"


def test_what_is_read_together_with_it_is_not_guessed() -> None:
    """A default in its place would make another run."""
    recipe = imported("run.sh", "data.train_batch_size=abc", *GEO3K)
    assert "minibatches" not in recipe
    assert "prompts_per_step" not in recipe


def test_a_run_has_no_recipe_without_its_advantage() -> None:
    told = "algorithm.adv_estimator=[1, 2]: there is no such advantage here; set it to grpo, "
    assert told in error_of("run.sh", "algorithm.adv_estimator=[1,2]", *GEO3K)


@pytest.mark.parametrize(
    ("words", "circle"),
    [
        (["runner.max_steps=${runner.max_steps}"], "runner.max_steps -> runner.max_steps"),
        (
            ["runner.max_steps=${runner.x}", "runner.x=${runner.max_steps}"],
            "runner.max_steps -> runner.x -> runner.max_steps",
        ),
    ],
)
def test_settings_in_a_circle_are_named(words: list[str], circle: str) -> None:
    told = f"error: {circle}: these settings refer to each other in a circle; write the value of one"
    assert error_of("geo3k.yaml", *words) == told
