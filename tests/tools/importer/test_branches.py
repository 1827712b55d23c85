"""The rules' rarer branches: a value that few runs set becomes what it means there, or is listed as left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tools.importer.imports import GEO3K, error_of, imported, resolved
from tests.tools.importer.runs_of_others import RLINF, VERL

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(autouse=True)
def in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(VERL, encoding="utf-8")
    Path("geo3k.yaml").write_text(RLINF, encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ([f"{ACTOR}.policy_loss.loss_mode=cispo"], {"algorithm.loss.name": "cispo", "algorithm.loss.dual_clip": None}),
        ([f"{ACTOR}.kl_loss_coef=0"], {"algorithm.kl": None}),
        ([f"{ACTOR}.tis_imp_ratio_cap=-1"], {"algorithm.importance_sampling_fix": False}),
        (["data.truncation=left"], {"data.on_bad_row": "skip"}),
        (["data.filter_overlong_prompts=False"], {"data.on_bad_row": "error"}),
    ],
)
def test_values_of_verl(words: list[str], settings: dict[str, object]) -> None:
    found = resolved(imported("run.sh", *words, *GEO3K))
    assert {key: found.get(key) for key in settings} == settings


MEGATRON = f"{ACTOR}.megatron"


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        ([f"{ACTOR}.strategy=megatron"], (1, 1, 1, False, False)),
        (
            [f"{MEGATRON}.tensor_model_parallel_size=4", f"{MEGATRON}.pipeline_model_parallel_size=2"],
            (4, 2, 1, True, False),
        ),
        (
            [
                *(f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.expert_model_parallel_size=8"),
                *(f"{MEGATRON}.sequence_parallel=False", f"{MEGATRON}.optimizer_offload=True"),
            ],
            (2, 1, 8, False, True),
        ),
    ],
)
def test_settings_of_verls_megatron(words: list[str], backend: tuple[object, ...]) -> None:
    found = resolved(imported("run.sh", *words, *GEO3K))
    names = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
    keys = (*names, "sequence_parallel", "optimizer_offload")
    assert found["train.backend.name"] == "megatron"
    assert tuple(found[f"train.backend.{key}"] for key in keys) == backend
    assert found["train.gradient_checkpointing"] == "none", "verl's Megatron has another setting for that"


def test_what_megatron_does_not_take_over_is_listed() -> None:
    words = [
        *(f"{MEGATRON}.param_offload=True", f"{MEGATRON}.context_parallel_size=2"),
        *(f"{MEGATRON}.override_transformer_config.{key}" for key in ("recompute_granularity=full", "moe_aux=1")),
    ]
    recipe = imported("run.sh", *words, *GEO3K)
    head, _, _ = recipe.partition("# These need no setting here:")
    for key in ("param_offload", "context_parallel_size", "override_transformer_config.moe_aux"):
        assert f"{MEGATRON}.{key}: " in head
    assert "fsdp_config.optimizer_offload: Megatron trains, not FSDP" in recipe
    assert resolved(recipe)["train.gradient_checkpointing"] == "full"


def test_a_typo_beside_a_file_is_an_error_with_the_nearest_name() -> None:
    said = error_of("run.sh", "actor_rollout_ref.rollout.temprature=0.7", *GEO3K)
    assert said.endswith("no setting of verl; did you mean actor_rollout_ref.rollout.temperature?")
    said = error_of("run.sh", "actor_rolout_ref.rollout.temperature=0.7", *GEO3K)
    assert said.endswith("no setting of verl; did you mean actor_rollout_ref.rollout.temperature?")


def test_the_name_of_verls_config_for_megatron_is_its_backend() -> None:
    """A script that leaves all of Megatron's settings at their defaults."""
    named = VERL.replace("-m verl.trainer.main_ppo", "-m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml")
    Path("megatron.sh").write_text(named, encoding="utf-8")
    assert resolved(imported("megatron.sh", *GEO3K))["train.backend.name"] == "megatron"
    assert resolved(imported("run.sh", *GEO3K))["train.backend.name"] == "torch"


def test_all_gpus_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["geo3k.yaml", "cluster.component_placement.actor=all", "cluster.component_placement.rollout=all"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert resolved(imported(*words))["cluster.gpus_per_node"] == 8
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolved(imported(*words))["cluster.gpus_per_node"] is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    recipe = imported(*words)
    assert "cluster.component_placement.actor: this machine has no GPUs to count; set cluster.gpus_per_node=N" in recipe


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["data.truncation=left", "data.filter_overlong_prompts=False"], "data.truncation: a prompt is never cut"),
        (
            [f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"],
            f"{ACTOR}.ppo_micro_batch_size_per_gpu: it counts completions, and is not a multiple of the 5 of a group",
        ),
    ],
)
def test_values_of_verl_that_are_left_out(words: list[str], reason: str) -> None:
    recipe = imported("run.sh", *words, *GEO3K)
    head, _, _needless = recipe.partition("# These need no setting here:")
    assert reason in head
    resolved(recipe)


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["algorithm.max_num_gen_batches=1"], {"algorithm.dynamic_sampling": None}),
        (["runner.resume_dir=null"], {"resume": "never"}),
    ],
)
def test_values_of_rlinf(words: list[str], settings: dict[str, object]) -> None:
    found = resolved(imported("geo3k.yaml", *words))
    assert {key: found.get(key) for key in settings} == settings


def test_gpus_that_meet_in_part_are_no_placement() -> None:
    placements = ["cluster.component_placement.actor=0-3", "cluster.component_placement.rollout=2-5"]
    recipe = imported("geo3k.yaml", *placements)
    assert "cluster.component_placement.rollout: no placement here; set cluster.placement" in recipe
    assert resolved(recipe)["cluster.placement"] == "collocated"


def test_keys_with_nothing_in_them_need_nothing() -> None:
    """Unknown ones with an empty value, and known ones without a counterpart that are null."""
    empty = ["trainer.colours=[]", "trainer.shades={}", "trainer.tone=null", "data.video_key=null"]
    head, _, needless = imported("run.sh", *empty, *GEO3K).partition("# These need no setting here:")
    for word in empty:
        key = word.partition("=")[0]
        assert key not in head
        assert key in needless
