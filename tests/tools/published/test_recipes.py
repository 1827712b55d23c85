"""The recipes of published results have the authors' settings, key by key, and say what differs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fovea.config.loading import load_config
from fovea.config.recipes import read_recipe, recipes_folder, shipped_recipes
from fovea_gym.settings.base import Tree, leaves
from fovea_tools.importer.elsewhere import systems
from fovea_tools.importer.interpolation import Given
from fovea_tools.importer.translate import translate
from fovea_tools.published.catalogue import PublishedResult, published_results

ROOT = Path(__file__).parents[3]
RESULTS = published_results()
OF_THIS_MACHINE = (
    *("environment.", "rollout.engine.", "train.max_tokens_per_", "evaluate.", "plan.", "seed", "data.on_bad_row"),
)
"""Beginnings of settings that a recipe may have without one of the authors'."""
TEMPLATES = {  # of math.jinja, open_r1/grpo.py, evaluate_k12.py, prompts_dataset.py, mm_process_engine/prompt.py
    "easyr1_geo3k": "{prompt} You FIRST think about the reasoning process as an internal monologue and then provide",
    "r1v_clevr": "{prompt}  Output the thinking process in <think> </think> and final answer (number) in <answer>",
    "mm_eureka": "You should first thinks about the reasoning process in the mind and then provides the user with",
    "vl_rethinker": "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "deepeyes_zoom": "{prompt}\nThink first, call **zoom** if needed, then answer. Format strictly as:  <think>",
}


def settings_of(result: PublishedResult) -> Tree:
    return leaves(load_config([shipped_recipes()[name] for name in result.recipes], []).model_dump(mode="json"))


def header_of(result: PublishedResult) -> str:
    files = [shipped_recipes()[name].read_text(encoding="utf-8").splitlines() for name in result.recipes]
    return "\n".join(line for lines in files for line in lines if line.startswith("#"))


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS.keys())
def test_the_recipes_have_the_authors_settings_and_set_nothing_else(result: PublishedResult) -> None:
    settings = settings_of(result)
    wanted = {key: value for each in result.settings for key, value in each.ours.items()}
    # null of a section leaves no leaf below
    assert {key: settings.get(key) for key in wanted} == wanted
    known = wanted.keys() | {"algorithm.name"}
    if result.name == "thinklite_7b":  # it is EasyR1's but for model and rows, as its head says
        known |= {key for each in RESULTS["easyr1_geo3k_7b"].settings for key in each.ours}
    set_here = {key for name in result.recipes for key in leaves(read_recipe(shipped_recipes()[name]))}
    assert {key for key in set_here & settings.keys() - known if not key.startswith(OF_THIS_MACHINE)} == set()


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS.keys())
def test_the_head_names_what_was_read_the_figure_and_what_differs(result: PublishedResult) -> None:
    head = header_of(result)
    commits = re.findall(r" at ([0-9a-f]{7}) ", result.source)
    figures = [value for value in (result.figure.before, result.figure.after) if value is not None]
    if shipped_recipes()[result.recipes[-1]].parent.name == "published":
        assert commits
        assert all(commit in head for commit in commits)
        assert all(f"{value:.2f}"[1:] in head or f"{100 * value:.1f}" in head for value in figures)
    names = [re.split(r"[ ,*]", each.name.rpartition(".")[2])[0] for each in result.settings if each.differs]
    assert [name for name in names if name not in head] == []


@pytest.mark.parametrize("name", [name for name, result in RESULTS.items() if result.system])
def test_the_importer_makes_the_same_of_the_authors_values(name: str) -> None:
    """But for settings whose difference is declared, and those of places and trackers."""
    result = RESULTS[name]
    system = systems()[str(result.system)]
    given = {each.name: Given(key=each.name, value=each.value, where="results.yaml") for each in result.settings}
    translation = translate(system, given, result.environment)  # type: ignore[arg-type]
    declared = {key for each in result.settings if each.differs for key in each.ours}
    recipe, used = settings_of(result), {key for each in result.settings for key in each.ours}
    made = {line.key: line.value for line in translation.lines if line.key in used - declared}
    assert {key: recipe.get(key) for key in made} == made
    assert len(made) >= 20
    assert translation.unknown == ()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_instruction_is_theirs(name: str) -> None:
    template = load_config([shipped_recipes()[name]], []).environment.model_dump()["prompt_template"]
    assert template.startswith(TEMPLATES[name])


def test_the_page_of_the_docs_has_every_result() -> None:
    table = (ROOT / "docs/published.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split("`")[1]: [cell.strip() for cell in line.split("|")] for line in table if line.startswith("| `")}
    assert list(rows) == list(RESULTS)
    for name, result in RESULTS.items():
        assert rows[name][2].split() == list(result.recipes)
        after = result.figure.after
        assert after is None or f"{after:.2f}"[1:] in rows[name][3] or f"{100 * after:.1f}" in rows[name][3]


def test_results_name_shipped_recipes() -> None:
    named = {recipe for result in RESULTS.values() for recipe in result.recipes}
    shipped = {path.stem for path in recipes_folder().glob("published/*.yaml")}
    assert shipped <= named <= shipped_recipes().keys()
