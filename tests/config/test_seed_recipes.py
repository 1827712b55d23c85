"""Recipes after the published workflows of mixtrain and verl have their values, and say so in their headers.

The right sides of the tables are theirs: the inputs, reward and stages of vlm-rl-training; the page on verl's training
of vision-language models, with the settings of verl's Geometry3K run of the same model.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from fovea.config.base import leaves
from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipe

RECIPES = Path(__file__).parents[2] / "recipes"

PPO: dict[str, tuple[str, object]] = {
    "model.path": ("model_name", "Qwen/Qwen2-VL-7B-Instruct"),
    "max_steps": ("total_steps", 625),  # its 10,000 steps of one answer, returned as 625 episodes
    "rollout.prompts_per_step": ("total_episodes", 16),
    "rollout.samples_per_prompt": ("one answer a step", 1),
    "train.learning_rate": ("learning_rate", 5e-7),
    "curriculum.enabled": ("curriculum_enabled", True),
    "algorithm.name": ("PPO", "ppo"),
    "algorithm.advantage.name": ("GAE", "gae"),
    "algorithm.ppo_epochs": ("ppo_epochs", 4),
    "algorithm.loss.clip_low": ("clip_epsilon", 0.2),
    "algorithm.loss.clip_high": ("clip_epsilon", 0.2),
    "algorithm.advantage.critic.value_coef": ("value_coef", 0.5),
    "algorithm.advantage.critic.trunk": ("a value head", "shared"),
    "algorithm.entropy_coef": ("entropy_coef", 0.01),
    "algorithm.advantage.gamma": ("gamma", 0.99),
    "algorithm.advantage.gae_lambda": ("gae_lambda", 0.95),
    "algorithm.kl": ("no reference model", None),
    "checkpoint.every_steps": ("checkpoint_interval", 63),
    "checkpoint.keep": ("checkpoint_interval", 10),
    "cluster.gpus_per_node": ("gpu_per_node", 4),
    "max_hours": ("timeout 14400 s", 3.5),
}
GEOSPOT = PPO | {
    "environment.name": ("env_name", "geospot"),
    "environment.weights.country": ("reward", 0.3),
    "environment.weights.region": ("reward", 0.2),
    "environment.weights.city": ("reward", 0.2),
    "environment.weights.coordinates": ("reward", 0.3),
    "environment.tolerances_km": ("tolerance", [500, 200, 100, 50, 25]),
    "curriculum.starts": ("stages", [7, 19, 38, 63]),  # 100, 300, 600 and 1,000 answers
    "environment.columns.lat": ("env_dataset", "lat"),
    "environment.columns.lon": ("env_dataset", "lon"),
    "environment.columns.country": ("env_dataset", "country"),
    "environment.columns.city": ("env_dataset", "city"),
}
VQA = PPO | {
    "environment.name": ("visual QA", "vqa"),
    "environment.prompt_key": ("question", "question"),
    "environment.answer_key": ("answer", "answer"),
    "environment.kind_key": ("type", "type"),
}
POKEMON: dict[str, tuple[str, object]] = {
    "model.path": ("model.path", "Qwen/Qwen2.5-VL-7B-Instruct"),
    "environment.name": ("image captioning", "caption"),
    "environment.train_files": ("data_preprocess/pokemon.py", ["llamafactory/pokemon-gpt4o-captions@train[:90%]"]),
    "environment.test_files": ("a tenth held out", ["llamafactory/pokemon-gpt4o-captions@train[90%:]"]),
    "algorithm.advantage.name": ("algorithm.adv_estimator", "grpo"),
    "rollout.samples_per_prompt": ("rollout.n", 5),
    "algorithm.kl.name": ("actor.use_kl_loss", "loss"),
    "algorithm.kl.coef": ("kl_loss_coef", 0.01),
    "algorithm.kl.estimator": ("low_var_kl", "k3"),
    "algorithm.loss.clip_low": ("actor.clip_ratio", 0.2),
    "algorithm.loss.clip_high": ("actor.clip_ratio", 0.2),
    "algorithm.loss.dual_clip": ("clip_ratio_c", 3.0),
    "algorithm.entropy_coef": ("entropy_coeff", 0.0),
    "algorithm.aggregation": ("actor.loss_agg_mode", "token-mean"),
    "train.learning_rate": ("actor.optim.lr", 1e-6),
    "train.betas": ("betas", [0.9, 0.999]),
    "train.weight_decay": ("weight_decay", 0.01),
    "train.lr_warmup_steps": ("no warm-up", 0),
    "train.gradient_checkpointing": ("model.enable_gradient_checkpointing", "full"),
    "train.enable_dynamic_batch_size": ("actor.use_dynamic_bsz", True),
    "train.max_tokens_per_microbatch": ("ppo_max_token_len_per_gpu", 6144),
    "model.freeze_vision_tower": ("actor.freeze_vision_tower", True),
    "checkpoint.every_steps": ("trainer.save_freq", 20),
    "evaluate.every_steps": ("test_freq", 5),
    "max_epochs": ("total_epochs", 15),
}
TABLES = {"vlm_gym_geospot.yaml": GEOSPOT, "vlm_gym_vqa.yaml": VQA, "pokemon.yaml": POKEMON}


@pytest.mark.parametrize(("recipe", "table"), TABLES.items())
def test_the_recipe_has_their_values(recipe: str, table: dict[str, tuple[str, object]]) -> None:
    ours = leaves(load_config([RECIPES / recipe], []).model_dump(mode="json"))
    assert {key: ours[key] for key in table} == {key: value for key, (_, value) in table.items()}


@pytest.mark.parametrize(("recipe", "table"), TABLES.items())
def test_the_header_names_what_it_takes_over(recipe: str, table: dict[str, tuple[str, object]]) -> None:
    header = (RECIPES / recipe).read_text(encoding="utf-8").partition("\nseed:")[0].replace("\n# ", " ")
    assert sorted({theirs for theirs, _ in table.values() if "_" in theirs and theirs not in header}) == []
    assert " -> " in header


ROOT = Path(__file__).parents[2]


def test_a_checkout_has_its_recipes_beside_the_package() -> None:
    assert shipped_recipe("vlm_gym_geospot") == ROOT / "recipes" / "vlm_gym_geospot.yaml"


def test_an_installed_wheel_finds_every_recipe(tmp_path: Path) -> None:
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as files:
        files.extractall(tmp_path / "site")
    find = "from fovea.config.recipes import shipped_recipe; print(shipped_recipe('shapes').parent)"
    done = subprocess.run(
        [sys.executable, "-c", find],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        timeout=120,
        check=True,
        capture_output=True,
        text=True,
    )
    folder = Path(done.stdout.strip())
    assert folder == tmp_path / "site" / "fovea" / "recipes"
    shipped, ours = (
        {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*.yaml")}
        for top in (folder, ROOT / "recipes")
    )
    assert shipped == ours
