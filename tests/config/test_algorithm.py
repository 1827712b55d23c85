"""Names of papers and what they set; combinations that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from fovea.config.algorithm import DEFAULTS_OF
from fovea.config.loading import dump_config, load_config
from fovea.config.run import Algorithm, Config, Critic, Model
from fovea.errors import ConfigError

RECIPE = "recipes/shapes.yaml"


def settings(*overrides: str) -> Config:
    return load_config([Path(RECIPE)], list(overrides))


def test_each_name_sets_the_defaults_of_its_paper() -> None:
    assert Algorithm(name="dr_grpo").aggregation == "seq-mean-token-sum-norm"
    dapo = Algorithm(name="dapo")
    assert (dapo.clip_low, dapo.clip_high, dapo.dynamic_sampling, dapo.overlong_buffer_frac) == (0.2, 0.28, True, 0.2)
    gspo = Algorithm(name="gspo")
    assert (gspo.loss, gspo.clip_low, gspo.clip_high, gspo.dual_clip) == ("gspo", 3e-4, 4e-4, None)
    rloo = Algorithm(name="rloo")
    assert (rloo.advantage, rloo.kl_in, rloo.kl_estimator) == ("rloo", "reward", "k1")
    ppo = Algorithm(name="ppo")
    assert (ppo.ppo_epochs, ppo.clip_low, ppo.clip_high, ppo.value_coef) == (4, 0.2, 0.2, 0.5)
    assert (ppo.entropy_coef, ppo.gamma, ppo.gae_lambda, ppo.value_clip) == (0.01, 0.99, 0.95, 0.5)
    assert ppo.max_policy_kl == 0.03
    assert Algorithm() == Algorithm(name="grpo")


@pytest.mark.parametrize("name", DEFAULTS_OF)
def test_every_part_can_be_overridden_and_written_down(name: str, tmp_path: Path) -> None:
    """A resolved config reads back to itself, whatever its name would set."""
    config = settings(f"algorithm.name={name}", "algorithm.clip_high=0.33", "algorithm.kl_coef=0.02")
    assert (config.algorithm.clip_high, config.algorithm.kl_coef) == (0.33, 0.02)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config([tmp_path / "config.yaml"], []) == config


def test_a_name_replaces_what_the_recipe_set_of_its_parts_and_nothing_else() -> None:
    """The recipe sets clip_high=0.28 and entropy_coef=0.08; order on the command line does not matter."""
    gspo = settings("algorithm.name=gspo").algorithm
    assert (gspo.clip_high, gspo.entropy_coef) == (4e-4, 0.08)
    assert settings("algorithm.clip_high=0.1", "algorithm.name=gspo").algorithm.clip_high == 0.1
    assert settings("algorithm.name=grpo").algorithm == settings().algorithm
    ppo = settings("algorithm.name=ppo").algorithm
    assert (ppo.entropy_coef, ppo.clip_low, ppo.clip_high) == (0.01, 0.2, 0.2)
    assert settings("algorithm.kl_in=reward", "algorithm.kl_coef=0.1").algorithm.kl_estimator == "k1"


@pytest.mark.parametrize("old", DEFAULTS_OF)
@pytest.mark.parametrize("new", DEFAULTS_OF)
def test_a_name_over_a_resolved_config_leaves_nothing_of_the_old_one(old: str, new: str, tmp_path: Path) -> None:
    written = tmp_path / "config.yaml"
    written.write_text(dump_config(settings(f"algorithm.name={old}", "algorithm.entropy_coef=0.02")))
    renamed = load_config([written], [f"algorithm.name={new}"]).algorithm
    kept = {} if "entropy_coef" in {**DEFAULTS_OF[new], **DEFAULTS_OF[old]} and old != new else {"entropy_coef": 0.02}
    kept |= {"max_groups_without_signal": 8}
    kept |= {} if "clip_high" in {**DEFAULTS_OF[new], **DEFAULTS_OF[old]} else {"clip_high": 0.28}
    assert renamed == Algorithm.model_validate({"name": new, **kept})


def test_clip_epsilon_sets_both_bounds() -> None:
    algorithm = settings("algorithm.clip_epsilon=0.1").algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == (0.1, 0.1)
    with pytest.raises(ConfigError, match="clip_epsilon stands for clip_low and clip_high, which are set beside it"):
        settings("algorithm={clip_epsilon: 0.1, clip_low: 0.2}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": "gspo", "advantage": "gae"}, "every token an advantage of its own; set algorithm.loss=clip"),
        ({"loss": "gspo", "name": "reinforce++"}, "reinforce++ with a KL in the reward gives every token an advantage"),
        ({"loss": "sapo", "dual_clip": 3.0}, "dual_clip is part of loss=clip"),
        ({"kl_target": 0.1}, "set kl_in=reward with a kl_coef, or kl_target=null"),
        ({"kl_target": 0.1, "kl_coef": 0.1}, "set kl_in=reward with a kl_coef"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "k1 in the loss has a gradient of 0 on average"),
        ({"importance_sampling_clip": 5.0}, "importance_sampling_fix=true, or algorithm.importance_sampling_clip=2.0"),
        ({"gamma": 0.9}, "no value function; set algorithm.name=ppo, or algorithm.gamma=1.0"),
        ({"value_clip": None}, "no value function; set algorithm.name=ppo, or algorithm.value_clip=0.5"),
        ({"loss": "sapo", "clip_high": 0.28}, "loss=sapo has none"),
        ({"sapo_temperature_positive": 2.0}, "set algorithm.loss=sapo, or algorithm.sapo_temperature_positive=1.0"),
        ({"max_gen_batches": 3}, "set algorithm.dynamic_sampling=true, or algorithm.max_gen_batches=10"),
        ({"overlong_penalty_factor": 0.5}, "set algorithm.overlong_buffer_frac"),
        ({"kl_horizon_samples": 99}, "set algorithm.kl_target"),
        ({"kl_in": "reward"}, "set algorithm.kl_coef, or algorithm.kl_in=loss"),
        ({"kl_estimator": "k2"}, "set algorithm.kl_coef, or algorithm.kl_estimator=k3"),
        ({"max_policy_kl": 0.1}, "of which there is one; set algorithm.ppo_epochs or"),
    ],
)
def test_contradictions_are_refused_with_a_way_out(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Algorithm.model_validate(given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.name=rloo", "rollout.samples_per_prompt=1"], "advantage=rloo compares the completions"),
        (["algorithm.dynamic_sampling=true", "rollout.samples_per_prompt=1"],
         "dynamic_sampling=true compares"),
        (["train.groups_per_microbatch=2"], "train.enable_dynamic_batch_size=false, or train.groups_per_microbatch=1"),
        (["critic.warmup_steps=3"], "set algorithm.name=ppo, or critic.warmup_steps=0"),
        (["algorithm.kl_in=reward", "algorithm.kl_coef=0.1", "algorithm.kl_target=0.1",
          "algorithm.kl_horizon_samples=320"], "no more than the 320 completions of one step"),
        (["algorithm.name=grop"], "algorithm.name"),
        (["algorithm.ppo_epoch=2"], "did you mean algorithm.ppo_epochs?"),
    ],
)  # fmt: skip
def test_what_a_run_is_told(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize("recipe", sorted(Path("recipes").glob("shapes*.yaml")), ids=str)
@pytest.mark.parametrize("name", DEFAULTS_OF)
def test_any_name_goes_over_any_recipe(recipe: Path, name: str) -> None:
    assert load_config([recipe], [f"algorithm.name={name}"]).algorithm.name == name


def test_a_run_from_before_the_critics_rate_followed_the_policys_can_be_read(tmp_path: Path) -> None:
    """Its config.yaml has the rate of then, whatever its algorithm."""
    written = tmp_path / "config.yaml"
    written.write_text(dump_config(settings()).replace("learning_rate: null", "learning_rate: 1.0e-05"))
    assert load_config([written], []).critic.learning_rate == 1e-5


def test_ppo_needs_no_groups() -> None:
    config = Config(model=Model(path="folder"), algorithm=Algorithm(name="ppo"), critic=Critic(warmup_steps=2))
    assert config.algorithm.needs_values
    assert settings("algorithm.name=ppo", "rollout.samples_per_prompt=1")


@pytest.mark.parametrize("name", list(DEFAULTS_OF))
def test_what_a_paper_sets_is_never_refused_as_unread(name: str) -> None:
    """rloo sets where its KL stands, dapo a bound on the ratio: the user has changed neither."""
    changes: dict[str, dict[str, object]] = {"rloo": {"kl_coef": 0.0}, "dapo": {"loss": "sapo"}}
    settings = Algorithm.model_validate({"name": name, **changes.get(name, {})})
    assert (settings.kl_in == "reward") == (name in ("rloo", "reinforce++"))


def test_a_critic_that_would_wait_for_ever_or_detach_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"set critic\.trunk=shared, or critic\.detach_trunk=false"):
        Critic(trunk="separate", detach_trunk=True)
    with pytest.raises(ValidationError, match="leaves the policy none of max_steps=5"):
        Config.model_validate(
            {"model": {"tiny": {}}, "max_steps": 5, "algorithm": {"name": "ppo"}, "critic": {"warmup_steps": 5}}
        )
