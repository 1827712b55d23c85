"""Names of papers and what they set; combinations that cannot work."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from fovea.config.algorithm import (
    DEFAULTS_OF,
    Algorithm,
    ClippedLoss,
    Critic,
    DynamicSampling,
    Gae,
    GspoLoss,
    KlInReward,
    Overlong,
    Rloo,
    SapoLoss,
)
from fovea.config.describe import describe
from fovea.config.loading import dump_config, load_config
from fovea.config.model import Model
from fovea.config.run import Config
from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import leaves
from gym_tests.tables import table

RECIPE = "recipes/shapes.yaml"


def settings(*overrides: str) -> Config:
    return load_config([Path(RECIPE)], list(overrides))


def test_each_name_sets_the_defaults_of_its_paper() -> None:
    assert Algorithm(name="dr_grpo").aggregation == "seq-mean-token-sum-norm"
    dapo = Algorithm(name="dapo")
    assert dapo.loss == ClippedLoss(clip_low=0.2, clip_high=0.28)
    assert (dapo.dynamic_sampling, dapo.overlong) == (DynamicSampling(), Overlong(buffer_frac=0.2))
    gspo = Algorithm(name="gspo")
    assert gspo.loss == GspoLoss(clip_low=3e-4, clip_high=4e-4)
    rloo = Algorithm(name="rloo")
    assert (rloo.advantage, rloo.kl) == (Rloo(), KlInReward(coef=0.03, estimator="k1"))
    ppo = Algorithm(name="ppo")
    assert (ppo.ppo_epochs, ppo.loss) == (4, ClippedLoss(clip_low=0.2, clip_high=0.2))
    assert (ppo.entropy_coef, ppo.max_policy_kl) == (0.01, 0.03)
    critic = Critic(value_coef=0.5, value_clip=0.5)
    assert ppo.advantage == Gae(gamma=0.99, gae_lambda=0.95, critic=critic)
    assert Algorithm() == Algorithm(name="grpo")


@pytest.mark.parametrize("name", DEFAULTS_OF)
def test_every_part_can_be_overridden_and_written_down(name: str, tmp_path: Path) -> None:
    """A resolved config reads back to itself, whatever its name would set."""
    config = settings(f"algorithm.name={name}", "algorithm.loss.clip_high=0.33", "algorithm.kl.coef=0.02")
    assert config.algorithm.kl is not None
    assert (config.algorithm.loss.clip_high, config.algorithm.kl.coef) == (0.33, 0.02)  # type: ignore[union-attr]
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config([tmp_path / "config.yaml"], []) == config


def test_a_name_replaces_what_the_recipe_set_of_its_parts_and_nothing_else() -> None:
    """The recipe sets loss.clip_high=0.28 and entropy_coef=0.08; order on the command line does not matter."""
    gspo = settings("algorithm.name=gspo").algorithm
    assert (gspo.loss, gspo.entropy_coef) == (GspoLoss(), 0.08)
    assert settings("algorithm.loss.clip_high=0.1", "algorithm.name=gspo").algorithm.loss == GspoLoss(clip_high=0.1)
    assert settings("algorithm.name=grpo").algorithm == settings().algorithm
    ppo = settings("algorithm.name=ppo").algorithm
    assert (ppo.entropy_coef, ppo.loss) == (0.01, ClippedLoss(clip_low=0.2, clip_high=0.2))
    assert settings("algorithm.kl=reward", "algorithm.kl.coef=0.1").algorithm.kl == KlInReward(coef=0.1, estimator="k1")


def test_a_text_stands_for_its_section_and_a_choice_comes_first() -> None:
    """Outer choices before inner ones, and settings after both, wherever they are written."""
    later = ("algorithm.loss.temperature_positive=2", "algorithm.advantage.gae_lambda=0.9")
    chosen = settings(*later, "algorithm.loss=sapo", "algorithm.advantage=gae", "algorithm.name=dapo").algorithm
    assert chosen.loss == SapoLoss(temperature_positive=2)
    assert (chosen.advantage, chosen.name) == (Gae(gae_lambda=0.9), "dapo")
    assert settings("rollout.engine=embedded", "train.backend=torch") == settings()
    assert Algorithm.model_validate({"loss": "sapo"}).loss == SapoLoss()
    # and drops the recipe's clip_high=0.28, which would be no bound of gspo
    assert settings("algorithm.loss=gspo").algorithm.loss == GspoLoss()
    assert settings("algorithm.loss.name=clip").algorithm.loss == settings().algorithm.loss
    # true and false stand for an optional section
    assert settings("algorithm.dynamic_sampling=true").algorithm.dynamic_sampling == DynamicSampling()
    assert settings("algorithm.name=dapo", "algorithm.dynamic_sampling=false").algorithm.dynamic_sampling is None
    assert settings("warmup=false").warmup is None
    assert settings("algorithm.name=rloo", "algorithm.kl=null").algorithm.kl is None
    # a name in place of the section is that of the algorithm
    long, short = (settings(f"algorithm{key}=gspo", "algorithm.ppo_epochs=2") for key in (".name", ""))
    assert long == short
    assert settings("algorithm.ppo_epochs=2", "algorithm=gspo") == short
    assert short.algorithm.loss.name == "gspo"


@cache
def resolved(name: str) -> str:
    return dump_config(settings(f"algorithm.name={name}", "algorithm.entropy_coef=0.02"))


@table("old", DEFAULTS_OF)
@table("new", DEFAULTS_OF)
def test_a_name_over_a_resolved_config_leaves_nothing_of_the_old_one(old: str, new: str, tmp_path: Path) -> None:
    written = tmp_path / "config.yaml"
    written.write_text(resolved(old))
    renamed = load_config([written], [f"algorithm.name={new}"]).algorithm
    set_by_names = {**DEFAULTS_OF[new], **DEFAULTS_OF[old]}
    kept = {"max_groups_without_signal": 8}
    kept |= {} if "entropy_coef" in set_by_names and old != new else {"entropy_coef": 0.02}
    kept |= {} if "loss" in set_by_names else {"loss": {"clip_high": 0.28}}
    assert renamed == Algorithm.model_validate({"name": new, **kept})


def test_clip_epsilon_sets_both_bounds_and_is_listed_like_any_setting() -> None:
    assert settings("algorithm.loss.clip_epsilon=0.1").algorithm.loss == ClippedLoss(clip_low=0.1, clip_high=0.1)
    with pytest.raises(ConfigError, match=r"\bclip_epsilon\b.*\bclip_low and clip_high\b"):
        settings("algorithm.loss={clip_epsilon: 0.1, clip_low: 0.2}")
    docs = {setting.doc for setting in describe("algorithm.loss.clip_epsilon")}
    assert docs == {"[algorithm.loss.name=clip | gspo | cispo] Sets clip_low and clip_high."}


@table(
    ("override", "key", "variants"),
    [
        ("loss={name: sapo, dual_clip: 3}", "loss.dual_clip", "loss.name=clip | gspo"),
        ("loss={name: sapo, clip_high: 0.28}", "loss.clip_high", "loss.name=clip | cispo | gspo"),
        ("loss.temperature_positive=2", "loss.temperature_positive", "loss.name=sapo"),
        ("advantage.gamma=0.9", "advantage.gamma", "advantage.name=gae"),
        ("advantage.critic.value_clip=null", "advantage.critic.value_clip", "advantage.name=gae"),
        ("kl.controller.target=0.1", "kl.controller.target", "kl.name=reward"),
        ("kl={coef: 0.1, controller: {target: 0.1}}", "kl.controller.target", "kl.name=reward"),
        ("loss={name: sapo, clip_epsilon: 0.1}", "loss.clip_epsilon", "loss.name=clip | gspo | cispo"),
    ],
)
def test_what_nothing_reads_cannot_be_written(override: str, key: str, variants: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(f"algorithm.{override}")
    first = variants.partition(" | ")[0]
    told = f"algorithm.{key}: a setting of algorithm.{variants} only; drop it, or add algorithm.{first}"
    assert str(caught.value) == f"command line: {told}"


@table(
    ("words", "message"),
    [
        ("algorithm.name=rloo rollout.samples_per_prompt=1", "advantage=rloo compares the completions"),
        ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt=1, so that no group has a signal"),
        ("algorithm.name=dr_grpo rollout.samples_per_prompt=1", "advantage=dr_grpo compares the completions"),
        ("algorithm.advantage=reinforce++_baseline rollout.samples_per_prompt=1", "reinforce++_baseline compares the"),
        ("algorithm.dynamic_sampling=true rollout.samples_per_prompt=1", "dynamic_sampling=true compares"),
        ("train.groups_per_microbatch=2", "train.enable_dynamic_batch_size=false, or train.groups_per_microbatch=1"),
        (
            "algorithm.kl=reward algorithm.kl.controller.target=0.1 algorithm.kl.controller.horizon_samples=320",
            "no more than the 320 completions of one step",
        ),
        ("train.vision_tower_learning_rate=1e-5 model.lora={}", "the vision tower is frozen; leave it out, or"),
        ("train.projector_learning_rate=1e-5 model.freeze_vision_tower=true", "but the projector is frozen"),
        ("algorithm.loss.clip_high=1e300", "clip_high: 1e+300 does not fit; allowed: number >= 0 and <= 1e+09"),
        ("algorithm.loss.name=sapo algorithm.loss.temperature_negative=1e39", "negative: 1e+39 does not fit"),
        ("algorithm.kl.coef=0", "algorithm.kl.coef: 0 does not fit; allowed: number > 0"),
        # its gradient is 0 on average, so that it would hold nothing
        ("algorithm.kl.estimator=k1", 'algorithm.kl.estimator: "k1" does not fit; allowed: k2 | k3 | k3+'),
        ("algorithm.kl=reward algorithm.kl.estimator=k9", 'kl.estimator: "k9" does not fit; allowed: k1 | k2 | k3'),
        ("algorithm.name=grop", "algorithm.name"),
        ("algorithm=grop", 'algorithm.name: "grop" does not fit; allowed: grpo | dr_grpo | '),
        ("algorithm=3", "algorithm: 3 does not fit; allowed: group of settings"),
        ("algorithm.ppo_epoch=2", "did you mean algorithm.ppo_epochs?"),
        ("algorithm.loss=gspo algorithm.advantage=gae", "every token a separate advantage; set algorithm.loss=clip"),
        ("algorithm.loss=gspo algorithm.name=reinforce++", "reinforce++ with a KL in the reward gives every token a"),
        ("algorithm.importance_sampling_clip=5", "_fix=true, or algorithm.importance_sampling_clip=2.0"),
        ("algorithm.max_policy_kl=0.1", "but there is only one; raise algorithm.ppo_epochs or"),
        ("algorithm.name=ppo algorithm.turn_discount=0.9", "set algorithm.advantage.turn_lambda=0.95"),
        ("algorithm.name=ppo algorithm.advantage.critic.warmup_steps=5 max_steps=5", "no step of max_steps=5"),
    ],
)
def test_what_a_run_is_told(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*words.split())
    assert message in str(caught.value)


@table("recipe", sorted(Path("recipes").glob("shapes*.yaml")))
@table("name", DEFAULTS_OF)
def test_any_name_goes_over_any_recipe(recipe: Path, name: str) -> None:
    assert load_config([recipe], [f"algorithm.name={name}"]).algorithm.name == name


def test_ppo_needs_no_groups() -> None:
    config = Config(model=Model(path="folder"), algorithm=Algorithm(name="ppo"))
    assert config.algorithm.critic == Critic()
    assert settings("algorithm.name=ppo", "rollout.samples_per_prompt=1")


@table("name", DEFAULTS_OF)
def test_what_a_paper_sets_is_never_refused_as_unread(name: str) -> None:
    """ppo sets a limit for passes after the first, dapo a bound on the ratio: the user has changed neither."""
    changes: dict[str, dict[str, object]] = {"rloo": {"kl": None}, "dapo": {"loss": "sapo"}, "ppo": {"ppo_epochs": 1}}
    settings = Algorithm.model_validate({"name": name, **changes.get(name, {})})
    assert settings.needs_old_logprobs == (name == "reinforce++")


LINES = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8").splitlines()


@table("name", DEFAULTS_OF)
def test_the_table_has_every_part_of_a_name_and_no_other(name: str) -> None:
    (row,) = [line for line in LINES if line.startswith(f"| {name} |")]
    parts = {
        f"{key.removesuffix('.name')}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in leaves(DEFAULTS_OF[name]).items()
    }
    assert set(row.split("|")[2].split("`")[1::2]) == parts
