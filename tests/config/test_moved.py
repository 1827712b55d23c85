"""A setting that has moved says where to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_origin

import pytest

from fovea.config.base import Section, Tree, leaves, sections_of, variants_of
from fovea.config.describe import OLD_KEYS, moved_key
from fovea.config.loading import config_of, dump_config, load_config
from fovea.config.recipes import read_yaml, write_value
from fovea.config.run import Config
from fovea.errors import ConfigError
from tests.tables import table

OLD = read_yaml(OLD_KEYS.read_bytes(), str(OLD_KEYS))
RECIPE = Path("recipes/shapes.yaml")


def exists(key: str, section: type[Section] = Config) -> bool:
    """True if a key can be set, in one member of a union at least; aliases count."""
    name, _, below = key.partition(".")
    if name in section.aliases:
        return not below
    field = section.model_fields.get(name)
    if field is None or not below:
        return field is not None
    entries = get_args(get_args(field.annotation)[0]) if get_origin(field.annotation) is dict else ()
    return below in entries or any(exists(below, inner) for inner in sections_of(field))


@table(("old", "new"), OLD["moved"].items())
def test_each_moved_key_names_a_setting_that_there_is(old: str, new: str) -> None:
    assert not exists(old), "a key that has not moved"
    assert exists(new.split(maxsplit=1)[0])


@pytest.mark.parametrize("old", sorted({*OLD["dropped"], *OLD["fixed"]} - set(OLD["moved"])))
def test_a_dropped_key_is_gone(old: str) -> None:
    assert not exists(old)
    with pytest.raises(ConfigError, match=f"command line: {old} is no longer set: .*; remove it"):
        load_config([RECIPE], [f"{old}=7"])


@table(("old", "value"), OLD["fixed"].items())
def test_a_setting_that_became_a_constant_may_stay_with_its_value(old: str, value: object) -> None:
    """As it does in the config.yaml of an older run."""
    words = [f"{old}={write_value(value)}", "environment={name: mixture, parts: {scenes: {}}}"]
    in_a_part = f"environment.parts.scenes.{old}={write_value(value)}"
    assert load_config([RECIPE], words[:1]) == load_config([RECIPE], [])
    if old.startswith("environment."):
        assert load_config([RECIPE], [*words[1:], in_a_part]) == load_config([RECIPE], words[1:])


@table(
    ("key", "value", "now"),
    [
        ("algorithm.clip_high", "0.3", "is now algorithm.loss.clip_high"),
        ("critic.warmup_steps", "3", "is now algorithm.advantage.critic.warmup_steps"),
        ("critic.detach_trunk", "true", "is now algorithm.advantage.critic.trunk (true is detached)"),
        ("log.tracker_max_pixels", "9", "is no longer set: it is always 262144; remove it"),
        ("environment.judge.url", "http://a/v1", "is now judge.url"),
        ("model_reward.judge.url", "http://a/v1", "is now judge.url"),
        ("model_reward.weight", "0.5", "is now model_reward (the share of each model, such as {judge: 0.5})"),
        ("second_opinion.judge.url", "http://a/v1", "is now judge.url"),
        ("critic", "{}", "is now algorithm.advantage.critic"),
        ("rollout.max_batch_tokens", "9", "is now rollout.engine.max_batch_tokens"),
    ],
)
def test_a_moved_key_says_where_it_is(key: str, value: str, now: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([RECIPE], [f"{key}={value}"])
    assert str(caught.value) == f"command line: {key} {now}"


JUDGE = {"url": "http://a/v1", "model": "m", "prompt": "{answer}?"}
CAPTIONS = {"name": "caption", "train_files": ["a"], "test_files": ["b"], "metric_weights": {"judge": 1}}
VQA = {"name": "vqa", "train_files": ["a"], "test_files": ["b"]}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"environment": {**CAPTIONS, "judge": JUDGE, "reward_model": None}}, {"environment": CAPTIONS}),
        (
            {"model_reward": {"weight": 0.25, "judge": {**JUDGE, "max_score": 10}, "reward_model": None}},
            {"model_reward": {"judge": 0.25}},
        ),
        (
            {"environment": VQA, "second_opinion": {"judge": JUDGE, "ask": "always", "accept_score": 0.8}},
            {"environment": VQA, "second_opinion": "always"},
        ),
    ],
)
def test_the_judge_of_an_older_run_is_that_of_the_run(old: Tree, new: Tree) -> None:
    tiny = {"model": {"tiny": {}}}
    assert config_of({**tiny, **old}, "config.yaml") == config_of({**tiny, **new, "judge": JUDGE}, "config.yaml")


def test_two_judges_of_an_older_run_are_one_too_many() -> None:
    other = {"weight": 0.25, "judge": {**JUDGE, "model": "n"}, "reward_model": None}
    tree = {"model": {"tiny": {}}, "environment": {**CAPTIONS, "judge": JUDGE}, "model_reward": other}
    with pytest.raises(ConfigError, match=r"environment\.judge\.url is now judge\.url"):
        config_of(tree, "config.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("parity.max_abs_logprob_diff=0.2", "parity.max_k3=0.02"), "parity.max_k3 is no longer set: it follows from "),
        (("model.tiny={num_heads: 4, head_dim: 32}",), "model.tiny.head_dim is no longer set: heads divide "),
        (
            ("environment.parts.scenes.environment.dev_seed=1",),
            "environment.parts.scenes: environment.dev_seed is no longer set: it is always 0; remove it",
        ),
        (
            ("environment=geospot", "environment.columns.lat=latitude", "environment.lat_key=lat"),
            "environment.lat_key is now environment.columns.lat",
        ),
        (
            (
                "environment={name: mixture, parts: {a: {environment: {name: geospot}}}}",
                "environment.parts.a.environment={columns: {lat: y}, lat_key: lat}",
            ),
            "environment.parts.a: environment.lat_key is now environment.columns.lat",
        ),
    ],
)
def test_a_constant_that_another_setting_changes_may_not_stay(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^command line: {re.escape(message)}"):
        load_config([RECIPE], words)


def test_an_old_recipe_is_told_of_several_at_once(tmp_path: Path) -> None:
    recipe = tmp_path / "old.yaml"
    keys = ("clip_low", "clip_high", "dual_clip", "gamma", "gae_lambda", "kl_in", "kl_target")
    recipe.write_text(f"model: {{tiny: {{}}}}\nalgorithm: {{{', '.join(f'{key}: 1' for key in keys)}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([recipe], [])
    assert "algorithm.clip_low is now algorithm.loss.clip_low; algorithm.clip_high is now" in str(caught.value)
    assert str(caught.value).endswith("algorithm.gae_lambda is now algorithm.advantage.gae_lambda; and 2 more")


def test_settings_of_today_have_not_moved() -> None:
    assert [key for key in leaves(read_yaml(dump_config(load_config([RECIPE], [])), "")) if moved_key(key)] == []


def test_every_union_is_chosen_by_its_first_section_unless_said() -> None:
    """What the loader takes where no layer names one is what pydantic takes."""

    def check(section: type[Section]) -> None:
        for field in section.model_fields.values():
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            if variants_of(field) and default is not None:
                assert type(default) is next(iter(variants_of(field).values()))
            for inner in sections_of(field):
                check(inner)

    check(Config)


def test_an_old_setting_in_another_section_is_no_setting_of_an_unchosen_environment() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([RECIPE], ["environment.reward_limit=5"])
    fix = "reward_limit is no longer set: it is always 1000000.0; remove it"
    assert str(caught.value) == f"command line: environment.reward_limit: no such setting; {fix}"
    with pytest.raises(ConfigError) as caught:
        load_config([RECIPE], ["environment.reward_mim_val=5"])
    assert "reward_min_val" not in str(caught.value), "a setting of another environment"
    with pytest.raises(ConfigError, match=r"did you mean environment\.image_side_px\?"):
        load_config([RECIPE], ["environment.image_side=5"])
