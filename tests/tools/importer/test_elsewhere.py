"""What users of other systems type leads to the setting that it is here."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea.config.describe import describe, unknown_key
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.metrics.names import definition_of
from fovea_gym.errors import ConfigError
from fovea_tools.importer.elsewhere import BELOW, Counterpart, System, systems
from gym_tests.tables import table

ALL = [(system, each) for system in systems().values() for each in system.settings]
OURS = {setting.key for setting in describe()} | {
    setting.key.removesuffix(".name") for setting in describe() if setting.key.endswith(".name")
}
SECTIONS = OURS | {key.rpartition(".")[0] for key in OURS}

TYPED = {
    "data.val_files": "environment.test_files",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.rollout_batch_size": "rollout.prompts_per_step",
    "rollout.n": "rollout.samples_per_prompt",
    "rollout.group_size": "rollout.samples_per_prompt",
    "algorithm.group_size": "rollout.samples_per_prompt",
    "rollout.response_length": "rollout.max_new_tokens",
    "rollout.name": "rollout.engine",
    "algorithm.adv_estimator": "algorithm.advantage",
    "algorithm.kl_beta": "algorithm.kl.coef",
    "algorithm.kl_penalty_type": "algorithm.kl.estimator",
    "algorithm.loss_agg_func": "algorithm.aggregation",
    "actor.loss_agg_mode": "algorithm.aggregation",
    "algorithm.clip_ratio_c": "algorithm.loss.dual_clip",
    "algorithm.ratio_clip_eps": "algorithm.loss.clip_epsilon",
    "algorithm.lam": "algorithm.advantage.gae_lambda",
    "critic.cliprange_value": "algorithm.advantage.critic.value_clip",
    "trainer.test_freq": "evaluate.every_steps",
    "custom_reward_function.path": "reward",
    "resume_checkpoint": "resume",
    "train.lr": "train.learning_rate",
    "kl_beta": "algorithm.kl.coef",
    "epsilon_high": "algorithm.loss.clip_high",
    "num_generations": "rollout.samples_per_prompt",
    "n_gpus_per_node": "cluster.gpus_per_node",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.max_loras": "rollout.engine.engine_args",
}
"""What users of verl, RLinf, mixtrain and TRL typed, and what it is here; most of it once led to another setting."""


def reads_as(system: System, setting: Counterpart) -> str:
    return f"{system.name}-{setting.theirs}"


@table(("typed", "right"), TYPED.items())
def test_what_people_typed_leads_to_the_right_setting(typed: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([Path("recipes/shapes.yaml")], [f"{typed}=1"])
    assert right in str(caught.value)


def can_be_set(key: str) -> bool:
    return key in OURS or key in Config.model_fields


def moved_or_unknown() -> Iterator[tuple[str, Counterpart]]:
    """Every setting with a counterpart whose key is none of ours, by a readable name."""
    for system, setting in ALL:
        if setting.ours and not can_be_set(setting.theirs) and not setting.theirs.endswith(BELOW):
            yield reads_as(system, setting), setting


@table(("name", "setting"), list(moved_or_unknown()))
def test_every_setting_with_a_counterpart_leads_to_it(name: str, setting: Counterpart) -> None:
    message = unknown_key(setting.theirs)
    assert any(key in message for key in setting.ours), message


@table(("name", "setting"), [(reads_as(*pair), pair[1]) for pair in ALL])
def test_a_counterpart_is_a_setting(name: str, setting: Counterpart) -> None:
    assert bool(setting.ours) != bool(setting.none), "a counterpart, or the reason why there is none"
    assert [key for key in setting.ours if key not in SECTIONS and key not in Config.model_fields] == []
    assert not setting.harmless or setting.none


def test_metrics_of_others_are_ours() -> None:
    elsewhere = {"step", "metrics.jsonl", "fovea eval --json FILE --html FILE"}
    names = {name for system in systems().values() for pair in system.metrics for name in pair.ours.split(", ")}
    assert sorted(name for name in names - elsewhere if definition_of(name) is None) == []


def test_one_name_for_two_figures_is_told_apart() -> None:
    (pair,) = [pair for pair in systems()["rlinf"].metrics if pair.theirs == "actor/rollout_train_kl"]
    assert pair.ours == "mismatch/abs"
    assert "mismatch/kl" in pair.note


def test_every_argument_of_trl_has_a_row() -> None:
    """The fields of the GRPOConfig that is installed."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0], "trainer", "grpo_config.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    fields = [each.target for each in classes["GRPOConfig"].body if isinstance(each, ast.AnnAssign)]
    names = {field.id for field in fields if isinstance(field, ast.Name)}
    assert len(names) > 60
    assert sorted(names - {setting.theirs for setting in systems()["trl"].settings}) == []


def test_a_section_of_another_system_is_for_the_importer() -> None:
    for key in ("trainer", "actor_rollout_ref", "runner"):
        assert "fovea import-config FILE" in unknown_key(key)
    # RLinf has a section `reward`, which is the name of one setting here
    with pytest.raises(ConfigError, match=r"RLinf's is environment\.reward_max_val here"):
        load_config([], ["model.tiny={}", "reward.reward_max_val=5"])
