"""Recipes of published results have the authors' settings, and `fovea reproduce` runs each with tiny weights."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.config.recipes import read_recipe, recipes_folder, shipped_recipes
from fovea.metrics.log import read_metrics
from fovea_gym.settings.base import Tree, leaves
from fovea_tools.importer.elsewhere import systems
from fovea_tools.importer.interpolation import Given
from fovea_tools.importer.translate import translate
from fovea_tools.published.catalogue import PublishedResult, find_result, published_results
from fovea_tools.published.reproduce import prepare
from gym_tests.environments.files import row
from gym_tests.tables import table
from tests.environments.grounding.layouts import gui_r1, lines, picture, vlm_r1_conversations

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


@table("name", TEMPLATES)
def test_the_instruction_is_theirs(name: str) -> None:
    template = load_config([shipped_recipes()[name]], []).environment.model_dump()["prompt_template"]
    assert template.startswith(TEMPLATES[name])


def test_the_page_of_the_docs_has_every_result() -> None:
    lines = (ROOT / "docs/published.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split("`")[1]: [cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| `")}
    assert list(rows) == list(RESULTS)
    for name, result in RESULTS.items():
        assert rows[name][2].split() == list(result.recipes)
        after = result.figure.after
        assert after is None or f"{after:.2f}"[1:] in rows[name][3] or f"{100 * after:.1f}" in rows[name][3]


def test_results_name_shipped_recipes() -> None:
    named = {recipe for result in RESULTS.values() for recipe in result.recipes}
    shipped = {path.stem for path in recipes_folder().glob("published/*.yaml")}
    assert shipped <= named <= shipped_recipes().keys()


REWARD = f"reward={Path(__file__).parents[2] / 'hash_reward.py'}:score"
SMALL = [
    *("tiny", "model.tiny={hidden_size: 32, num_layers: 1}", "warmup=null", "max_steps=2"),
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=6"),
    *("algorithm.minibatches=2", "log.progress=false", "log.tensorboard=false", "evaluate.image_controls=false"),
    *("evaluate.before_training=false", "parity.prompts=1", REWARD),
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def rows_in(folder: str, *splits: str, **renamed: str) -> None:
    """Rows in a folder below the working directory; columns under other names where they are renamed."""
    Path(folder).mkdir(parents=True)
    for split, colour in zip(splits, ("red", "blue", "green"), strict=False):
        rows = [row(f"How many sides have {n} squares?", str(4 * n), colour) for n in range(1, 9)]
        cells = [{renamed.get(name, name): value for name, value in each.items()} for each in rows]
        pq.write_table(pa.Table.from_pylist(cells), f"{folder}/{split}.parquet")


def reproduce(*words: str) -> Result:
    return CliRunner().invoke(app, ["reproduce", *words])


def geometry() -> list[str]:
    rows_in("data/geo3k", "train", "validation", "test")
    return []


def files_of(folder: str, **renamed: str) -> Callable[[], list[str]]:
    """Rows in Parquet files in place of those of a result, under the columns that its recipe names."""

    def write() -> list[str]:
        rows_in(folder, "train", "test", **renamed)
        files = {"train": "train", "dev": "test", "test": "test"}
        names = [f"environment.{split}_files=[{folder}/{file}.parquet]" for split, file in files.items()]
        return [*names, "environment.test_share=0"]

    return write


def places(layout: Callable[[Path], Path]) -> Callable[[], list[str]]:
    """Rows with places on their picture, in a layout of tests/environments/grounding."""

    def write() -> list[str]:
        file = layout(Path())
        return [f"environment.{split}_files=[{file}]" for split in ("train", "dev", "test")]

    return write


def thousandths(folder: Path) -> Path:
    solution = "<answer> (100,100),(600,500) </answer>"
    return lines(folder, [{"image": picture(folder), "problem": "the largest one", "solution": solution}])


def boards() -> list[str]:
    """The boards of the recipe, fewer of them."""
    return ["environment.train_size=20", "environment.dev_size=4", "environment.test_size=4"]


ROWS: dict[str, Callable[[], list[str]]] = {
    "r1v_clevr_2b": files_of("data/clevr", answer="solution", images="image"),
    "mm_eureka_7b": files_of("data/mm_eureka"),
    "vl_rethinker_7b": files_of("data/virl39k", problem="question", images="image"),
    "thinklite_7b": files_of("data/thinklite"),
    "vagen_sokoban_3b": boards,
    "deepeyes_zoom_7b": files_of("data/deepeyes"),
    "vlm_r1_rec_3b": places(vlm_r1_conversations),
    "gui_r1_3b": places(gui_r1),
    "visual_rft_lisa_2b": places(thousandths),
    "papo_7b": files_of("data/papo"),
    "vppo_7b": files_of("data/vppo"),
}


SLOW = [pytest.mark.slow]
HUGE = "model.tiny={hidden_size: 16384, num_heads: 512, num_layers: 100}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "easyr1_geo3k_7b" else SLOW) for name in published_results()]
)
def test_it_trains_and_writes_the_page(name: str) -> None:
    words = ROWS.get(name, geometry)()
    done = reproduce(name, *SMALL, *words)
    assert done.exit_code == 0, done.output
    page = Path("runs", name, "report.html")
    assert done.stdout.splitlines()[-1] == str(page)
    steps = read_metrics(page.parent)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["actions_trained"] > 0 for step in steps)
    result, summary = find_result(name), summary_of(page)
    figures, *_, settings = summary["tables"]
    published = {each["name"]: each["texts"][0] for each in figures["rows"]}
    after = result.figure.after
    assert published["after training"] == ("" if after is None else f"{100 * after:.1f}")
    assert re.fullmatch(r"[\d.]+ \[[\d.]+, [\d.]+\]", figures["rows"][-1]["texts"][1])
    shown = {each["name"]: each["texts"] for each in settings["rows"]}
    assert len(shown) == len(settings["rows"]), "the page has one row of a name"
    differing = [each for each in result.settings if each.differs]
    assert all(any(name.startswith(f"{each.name}=") for name in shown) for each in differing)
    assert any("max_steps=" in recipe and own.endswith("2") for recipe, own, _ in shown.values())
    assert summary["notes"][0].startswith(result.title)


def summary_of(page: Path) -> dict[str, Any]:
    (found,) = re.findall(r'id="data/summary/0/0">(.*?)</script>', page.read_text(encoding="utf-8"))
    summary: dict[str, Any] = json.loads(found)
    return summary


@table(
    ("words", "message"),
    [
        ([], "no result named; write fovea reproduce NAME"),
        *(
            ([name], "not a published result; did you mean easyr1_geo3k_7b or ")
            for name in ("easyr1_geo_7b", "EASYR1_GEO3K_7B")
        ),
        (["zzz"], "zzz: not a published result; the names are easyr1_geo3k_7b, "),
        (["easyr1_geo3k_7b", "rollout.n=3"], "verl's actor_rollout_ref.rollout.n is rollout.samples_per_prompt here"),
        (["easyr1_geo3k_7b", "--quiet"], "no such option; the options are --list, --debug and --help"),
        (["easyr1_geo3k_7b"], "model.path=Qwen/Qwen2.5-VL-7B-Instruct: its config.json is neither in the local cache"),
        (["easyr1_geo3k_7b", "tiny"], "run `fovea data geo3k` on a machine with a network, and copy data/geo3k here"),
        (["mm_eureka_7b", "tiny"], "data/mm_eureka/train.jsonl, data/mm_eureka/k12.jsonl not found; the hub's"),
        (["easyr1_geo3k_7b", "tiny", HUGE], "GiB of memory on the CPU (this machine has no GPU) and may use"),
    ],
)
def test_an_error_says_what_to_do(words: list[str], message: str) -> None:
    done = reproduce(*words)
    assert done.exit_code == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line


def test_the_list_has_every_result_with_its_figure() -> None:
    listed = reproduce("--list").stdout
    assert re.findall(r"^\w+", listed, re.MULTILINE) == list(published_results())
    assert "37 % -> 54 %" in listed
    assert "none that could be read" in listed


def test_several_gpus_get_a_process_each() -> None:
    result = find_result("easyr1_geo3k_7b")
    run = prepare(result, [shipped_recipes()[name] for name in result.recipes], ["run_dir=out-{name}"])
    several = replace(run, num_gpus=8)
    assert several.command[:5] == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8"]
    assert several.command[-1] == "run_dir=out-geo3k"
    on_ray = replace(several, overrides=[*run.overrides, "cluster.gpus_per_node=8"])
    assert on_ray.command[1:4] == ["-m", "fovea", "train"]
