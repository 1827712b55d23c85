"""The rules' rarer branches: a value that few runs set becomes what it means there, or is listed as left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.importer.imports import GEO3K, imported, resolved
from tests.importer.runs_of_others import RLINF, VERL

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


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["data.truncation=left", "data.filter_overlong_prompts=False"], "data.truncation: a prompt is never cut"),
        (
            [f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"],
            f"{ACTOR}.ppo_micro_batch_size_per_gpu: it counts completions, and is no multiple of the 5 of a group",
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
