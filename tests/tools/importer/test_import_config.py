"""Settings of public runs of verl and RLinf become recipes whose resolved settings are those of tables made by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea_gym.errors import FoveaError
from fovea_gym.settings.base import Tree, leaves
from fovea_tools.importer.docs import page
from fovea_tools.importer.elsewhere import BELOW, System, systems
from fovea_tools.importer.interpolation import Given
from fovea_tools.importer.reading import IMPORTED, read
from fovea_tools.importer.translate import recipe_text, translate
from gym_tests.tables import table
from tests.tools.importer.runs_of_others import CASES, RLINF, VERL, VERL_TABLE

ROOT = Path(__file__).parents[3]
GEO3K = ["--environment", "geo3k"]
ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
ROLLOUT = "actor_rollout_ref.rollout"
CIRCLE = "these settings refer to each other in a circle; set one of "
NO_DUAL_CLIP = {"algorithm.loss.dual_clip": None}
PLACEMENT = "cluster.component_placement"


@pytest.fixture(autouse=True)
def in_a_folder_with_both_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(VERL, encoding="utf-8")
    Path("geo3k.yaml").write_text(RLINF, encoding="utf-8")


def imported(*words: str) -> str:
    """The recipe that the command prints; `run.sh` has the rows of Geometry3K."""
    done = CliRunner().invoke(app, ["import-config", *words, *(GEO3K if "run.sh" in words else [])])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def head_of(recipe: str) -> str:
    """The remarks on what is left out."""
    return recipe.partition("# These need no setting here:")[0]


def error_of(*words: str) -> str:
    """The error of the command, which is one line."""
    done = CliRunner().invoke(app, ["import-config", *words, *(GEO3K if "run.sh" in words else [])])
    assert (done.exit_code, done.stdout, done.stderr.strip().count("\n")) == (2, "", 0)
    return done.stderr.strip()


def resolved(recipe: str) -> Tree:
    Path("recipe.yaml").write_text(recipe, encoding="utf-8")
    return leaves(load_config([Path("recipe.yaml")], []).model_dump(mode="json"))


def defaults(table: Tree) -> Tree:
    """The settings of a run with the members of unions of a table, and nothing else set."""
    named = ("environment.name", "rollout.engine.name", "algorithm.advantage.name", "algorithm.loss.name")
    chosen = [f"{key}={table[key]}" for key in named]
    kl = [f"algorithm.kl.name={table['algorithm.kl.name']}"] if "algorithm.kl.name" in table else []
    lora = ["model.lora={}"] if "model.lora.rank" in table else []
    files = ["environment.train_files=[a]", "environment.test_files=[a]", "model.path=x"]
    dapo = [f"algorithm.{key}=true" for key in ("dynamic_sampling", "overlong") if any(key in name for name in table)]
    controller = ["algorithm.kl.controller.target=1"] if any("controller" in name for name in table) else []
    return leaves(load_config([], [*chosen, *kl, *lora, *files, *dapo, *controller]).model_dump(mode="json"))


def assert_matches(recipe: str, table: Tree) -> None:
    """Key by key: what the table has is as it says, and what it lacks is at Fovea's default."""
    settings = resolved(recipe)
    assert {key: settings[key] for key in table} == table
    own = defaults(table)
    assert {key: value for key, value in settings.items() if key not in table and own.get(key) != value} == {}


@pytest.mark.parametrize(("words", "table"), CASES.values(), ids=CASES.keys())
def test_a_run_becomes_its_table(words: list[str], table: Tree) -> None:
    assert_matches(imported(*words), table)


@table(
    ("words", "settings"),
    [
        (["run.sh", f"{ACTOR}.policy_loss.loss_mode=cispo"], {"algorithm.loss.name": "cispo", **NO_DUAL_CLIP}),
        (["run.sh", f"{ACTOR}.kl_loss_coef=0"], {"algorithm.kl": None}),
        (["run.sh", f"{ACTOR}.tis_imp_ratio_cap=-1"], {"algorithm.importance_sampling_fix": False}),
        (["run.sh", "data.truncation=left"], {"data.on_bad_row": "skip"}),
        (["run.sh", "data.filter_overlong_prompts=False"], {"data.on_bad_row": "error"}),
        (["geo3k.yaml", "algorithm.max_num_gen_batches=1"], {"algorithm.dynamic_sampling": None}),
        (["geo3k.yaml", "runner.resume_dir=null"], {"resume": "never"}),
        # the config of verl for Megatron, which is not here, with all of its settings at their defaults
        (["run.sh", "--config-name=ppo_megatron_trainer.yaml"], {"train.backend.name": "megatron"}),
    ],
)
def test_rare_values(words: list[str], settings: Tree) -> None:
    found = resolved(imported(*words))
    assert {key: found.get(key) for key in settings} == settings


@table(
    ("words", "backend"),
    [
        ("strategy=megatron", (1, 1, 1, False, False)),
        ("megatron.tensor_model_parallel_size=4 megatron.pipeline_model_parallel_size=2", (4, 2, 1, True, False)),
        (
            "megatron.tensor_model_parallel_size=2 megatron.expert_model_parallel_size=8 "
            "megatron.sequence_parallel=False megatron.optimizer_offload=True",
            (2, 1, 8, False, True),
        ),
    ],
)
def test_settings_of_verls_megatron(words: str, backend: tuple[object, ...]) -> None:
    found = resolved(imported("run.sh", *(f"{ACTOR}.{word}" for word in words.split())))
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
    recipe = imported("run.sh", *words)
    for key in ("param_offload", "context_parallel_size", "override_transformer_config.moe_aux"):
        assert f"{MEGATRON}.{key}: " in head_of(recipe)
    assert "fsdp_config.optimizer_offload: Megatron trains, not FSDP" in recipe
    assert resolved(recipe)["train.gradient_checkpointing"] == "full"


def test_all_gpus_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["geo3k.yaml", f"{PLACEMENT}.actor=all", f"{PLACEMENT}.rollout=all"]
    for count, workers in ((8, 8), (1, None)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert resolved(imported(*words))["cluster.gpus_per_node"] == workers
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert f"{PLACEMENT}.actor: this machine has no GPUs to count; set cluster.gpus_per_node=N" in imported(*words)


def test_bare_words_are_enough() -> None:
    words = [word.replace("'", "") for word in VERL.split() if "." in word and "=" in word and "$" not in word]
    files = ["data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.rollout.name=vllm"]
    settings = resolved(imported(*words, *files, "data.max_response_length=7", *GEO3K))
    assert settings["rollout.prompts_per_step"] == VERL_TABLE["rollout.prompts_per_step"]
    assert settings["environment.train_files"] == ["a.parquet"]


def test_each_line_says_where_it_comes_from() -> None:
    recipe = imported("run.sh", "trainer.nnodes=2")
    assert "  prompts_per_step: 512  # data.train_batch_size=512 (run.sh line 11)\n" in recipe
    both = f"data.train_batch_size=512 (run.sh line 11); {ACTOR}.ppo_mini_batch_size=128 (run.sh line 17)"
    assert f"  minibatches: 4  # {both}\n" in recipe
    assert "  num_nodes: 2  # trainer.nnodes=2 (command line)\n" in recipe
    assert "  weight_decay: 0.01  # actor_rollout_ref.actor.optim.weight_decay=0.01 (verl's default)\n" in recipe
    settings = [line for line in recipe.splitlines() if not line.startswith("#") and not line.endswith(":")]
    assert all(line.partition("  # ")[2] for line in settings)


def test_what_has_no_counterpart_is_listed_with_its_reason() -> None:
    """And what needs none apart from it: unknown keys with nothing in them, and known ones that are null."""
    recipe = imported("run.sh", "trainer.colour=red", "data.video_key=clips", "trainer.logger=[swanlab,clearml]")
    assert "  swanlab_project: verl_grpo_example_geo3k" in recipe
    assert "# Without a counterpart here, and left out:\n#   data.video_key: videos are not read\n" in head_of(recipe)
    assert "#   trainer.logger: clearml not supported; metrics.jsonl in the run folder has every" in head_of(recipe)
    assert '# Unknown, and left out:\n#   trainer.colour="red" (command line)' in head_of(recipe)
    empty = {"trainer.colours": "[]", "trainer.shades": "{}", "trainer.tone": "null", "data.video_key": "null"}
    recipe = imported("run.sh", *(f"{key}={value}" for key, value in empty.items()))
    assert [key for key in empty if key in head_of(recipe) or key not in recipe] == []


@table(("file", "text"), [("run.sh", VERL), ("geo3k.yaml", RLINF)])
def test_every_given_setting_is_somewhere(file: str, text: str) -> None:
    recipe = imported(file)
    keys = [word.lstrip("+").partition("=")[0] for word in text.split() if "=" in word]
    assert [key for key in keys if "." in key and key not in recipe] == []


@table(
    ("words", "message"),
    [
        (["./run.sh"], "data.reward_fn_key=\"data_source\", verl's default: verl picks a row's grader by this column"),
        (["run.sh", "algorithm.use_kl_in_reward=True"], "a run has only one KL term; set one of them to false"),
        (["run.sh", f"{ACTOR}.clip_ratio=0.3"], "without effect in verl, where"),
        (["run.sh", f"{ROLLOUT}.response_length=99"], "is rollout.max_new_tokens=99; a run of Fovea"),
        (["run.sh", f"{ACTOR}.ppo_mini_batch_size=100"], "is not a multiple of it"),
        (["run.sh", "algorithm.adv_estimator=remax"], "no such advantage exists here; set it to one of grpo, gae"),
        (["run.sh", f"{ACTOR}.kl_loss_type=abs"], "no such estimator exists here; set it to one of"),
        (["run.sh", f"{ROLLOUT}.name=hf"], "verl needs an engine, and only vllm and sglang have a"),
        (["run.sh", f"{ACTOR}.optim.lr=-1"], f"{ACTOR}.optim.lr=-1 (command line)"),
        *(
            (["run.sh", f"{key}=0.7"], f"not a setting of verl; did you mean {ROLLOUT}.temperature?")
            for key in (f"{ROLLOUT}.temprature", "actor_rolout_ref.rollout.temperature")
        ),
        (["geo3k.yaml", "algorithm.sampling_params.max_new_tokens=9000"], "more than runner.seq_length=8192 minus"),
        (["geo3k.yaml", "actor.model.model_path=/other"], "a run of Fovea has one value; remove one of them"),
        (["geo3k.yaml", "--environment", "vqa"], "this means environment.name=geo3k, but --environment is vqa"),
        (["geo3k.yaml", "reward.reward_type=code"], "no environment here has this type; add --environment"),
        (["geo3k.yaml", "data.seed=${nothing:1}"], "is an unknown function; write its value"),
        (["geo3k.yaml", "actor.training_backend=megatron"], "it is a share of all steps"),
        (["geo3k.yaml", "runner.max_steps=${runner.max_steps}"], f"runner.max_steps -> runner.max_steps: {CIRCLE}"),
        (
            ["geo3k.yaml", "runner.max_steps=${runner.x}", "runner.x=${runner.max_steps}"],
            f"error: runner.max_steps -> runner.x -> runner.max_steps: {CIRCLE}",
        ),
        (["nothing.yaml"], "; give a YAML file or a script of verl or RLinf"),
        (["nothing.sh"], "nothing.sh: no such file in "),
        (["."], ".: this is a folder; give a YAML file or a script of verl or RLinf"),
        ([], "no settings found; write fovea import-config FILE"),
        (["foo.bar=1"], "foo.bar: neither verl nor RLinf has such settings; give a file of verl or RLinf"),
        (["x=1"], "x=1: neither a file nor a setting; give a file, or settings of"),
        (["data.shuffle=True"], "choose with --system verl or --system rlinf"),
    ],
)
def test_what_cannot_be_imported_is_told(words: list[str], message: str) -> None:
    assert message in error_of(*words)


def growing(first: object, value: str) -> str:
    """A YAML file in which each of 42 settings is made of the one before."""
    lines = [f"  a{n}: '{value.format(n - 1)}'" for n in range(1, 42)]
    return "\n".join(["runner:", f"  a0: {first}", *lines, "  max_steps: ${runner.a41}"])


def script_of(*lines: str) -> str:
    return "\n".join([*lines, "python -m verl.trainer.main_ppo data.train_files=$B data.val_files=x"])


@table(
    ("text", "message"),
    [
        (growing("ab", "${{runner.a{0}}}${{runner.a{0}}}"), "with its references replaced it has more than 100,000"),
        (growing("''", "${{runner.a{0}}}${{runner.a{0}}}"), "rollout.rollout_backend=null, RLinf's default"),
        (growing(9, "${{multiply:${{runner.a{0}}},${{runner.a{0}}}}}"), "larger than any setting"),
        (growing("x", "${{multiply:${{runner.a{0}}},1000000000000}}"), "has no value"),
        (
            "runner:\n" + "".join(f"  a{n}: ${{runner.a{n + 1}}}\n" for n in range(300)) + "  max_steps: ${runner.a0}",
            "runner.max_steps: its references lead through more than 50 settings; set it to a value",
        ),
        (
            script_of("A0=ab", *(f"A{n}=$A{n - 1}$A{n - 1}" for n in range(1, 42)), "B=$A41"),
            ": variables expand to more than 1,000,000 characters; write their values",
        ),
        (script_of("B=" + "${A:-" * 3000 + "x" + "}" * 3000), "more than 30 defaults are nested in each other"),
        *(
            (script_of(f"B=$(({term}))"), "is not arithmetic of known integers; add data.train_files=VALUE")
            for term in (f"{'(' * 3000}1{')' * 3000}", f"1{'+1' * 30000}")
        ),
    ],
)
def test_what_grows_without_end_is_refused(text: str, message: str) -> None:
    file = "geo3k.yaml" if text.startswith("runner") else "run.sh"
    Path(file).write_text(text, encoding="utf-8")
    assert message in error_of(file, *(["--system", "rlinf", *GEO3K] if file == "geo3k.yaml" else []))


def test_files_of_defaults_that_double_are_refused() -> None:
    for number in range(45):
        below = f"defaults: [a{number + 1}, a{number + 1}]\n" if number < 44 else "x: 1\n"
        Path(f"a{number}.yaml").write_text(below, encoding="utf-8")
    assert "`defaults` lists name more than 1000 files; name fewer" in error_of("a0.yaml")


def test_a_variable_that_nobody_sets_is_asked_for() -> None:
    Path("run.sh").write_text(VERL.replace("DATA=/data/geo3k\n", ""), encoding="utf-8")
    assert error_of("run.sh").endswith("add data.train_files=VALUE after the file")
    files = ["data.train_files=/d/train.parquet", "data.val_files=/d/test.parquet"]
    assert resolved(imported("run.sh", *files))["environment.train_files"] == ["/d/train.parquet"]
    # two values in one script contradict each other
    Path("run.sh").write_text(f"{VERL}\npython3 -m verl.trainer.main_ppo trainer.nnodes=4\n", encoding="utf-8")
    assert "run.sh line 41: trainer.nnodes=4, but run.sh line 38: trainer.nnodes=1; remove" in error_of("run.sh")
    assert resolved(imported("run.sh", "trainer.nnodes=3"))["cluster.num_nodes"] == 3


def test_text_of_a_file_stays_in_its_comment() -> None:
    hostile = "a\u2028seed: 7\x85reward: b\n"
    Path("geo3k.yaml").write_text(f"{RLINF}unknown: {{key: {json.dumps(hostile)}}}\n", encoding="utf-8")
    settings = resolved(imported("geo3k.yaml", f"data.system_prompt={json.dumps(hostile)}", "runner.max_steps=750"))
    assert (settings["seed"], settings["reward"]) == (41, None)


def test_a_file_is_written_once() -> None:
    imported("run.sh", "--out", "mine.yaml")
    assert load_config([Path("mine.yaml")], []).rollout.prompts_per_step == VERL_TABLE["rollout.prompts_per_step"]
    message = "mine.yaml: the file exists already; give another --out"
    assert error_of("run.sh", "--out", "mine.yaml").endswith(message)


@table(
    "options", ["--config-path=conf --config-name=mine", "--config-path conf --config-name mine", "-cp conf -cn mine"]
)
def test_the_config_that_a_command_names_is_read(options: str) -> None:
    """And the files of its `defaults` list; one that is not there is a remark."""
    Path("conf", "data").mkdir(parents=True, exist_ok=True)
    lists = "defaults:\n  - ppo_trainer\n  - data@data: few\n  - _self_\n"
    Path("conf", "mine.yaml").write_text(f"{lists}data:\n  train_batch_size: 1\n", encoding="utf-8")
    Path("conf", "data", "few.yaml").write_text("seed: 7\nmax_response_length: 1\n")
    Path("run.sh").write_text(VERL.replace("main_ppo ", f"main_ppo {options} "), encoding="utf-8")
    recipe = imported("run.sh")
    assert_matches(recipe, VERL_TABLE | {"seed": 7})
    assert "seed: 7  # data.seed=7 (data/few.yaml)" in recipe
    # a config that is not there is listed
    Path("run.sh").write_text(VERL.replace("main_ppo ", "main_ppo --config-name mine --config-dir gone "))
    recipe = imported("run.sh")
    assert "#   --config-name: its settings are in a YAML file that is not in --config-path; give that" in recipe
    assert "#   --config-dir: its settings are in YAML files that were not found" in recipe


def test_settings_of_trl_are_told_their_page() -> None:
    """In a YAML file, and in a script."""
    trl = "model_name_or_path: m\nnum_generations: 8\nmax_completion_length: 64\nunheard_of: 1\n"
    Path("trl.yaml").write_text(trl, encoding="utf-8")
    assert error_of("trl.yaml") == (
        "error: 3 of 4 settings belong to TRL, and only files of verl and RLinf can be imported; write a recipe with "
        "the table that python -m fovea_tools.importer.docs trl prints (model_name_or_path is model.path, "
        "num_generations is rollout.samples_per_prompt, max_completion_length is rollout.max_new_tokens)"
    )
    launch = "accelerate launch --config_file zero3.yaml grpo_vlm.py"
    Path("trl.sh").write_text(f"{launch} \\\n  --learning_rate 1e-5 --num_generations=8\n")
    assert error_of("trl.sh").startswith("error: 2 of 3 settings belong to TRL, and only files of verl")
    Path("other.sh").write_text("python train.py --config_file zero3.yaml\n")
    assert error_of("other.sh") == "error: no settings found; write fovea import-config FILE [KEY=VALUE]..."


VALUES = [None, 0, -1, "abc", [1, 2], [[1]], {"a": 1}, True]
OTHER_BRANCHES = {
    "verl": {"reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 512},
    "rlinf": {"algorithm.adv_type": "gae", "runner.max_steps": 750},
}


def given(settings: dict[str, Any]) -> dict[str, Given]:
    return {key: Given(key=key, value=value, where="here") for key, value in settings.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPORTED)
@pytest.mark.parametrize("is_alone", [True, False])
def test_no_value_of_any_key_is_a_traceback(name: str, is_alone: bool) -> None:
    """Every known key with every kind of value, alone and over settings that lead into other branches of the rules."""
    run = {} if is_alone else read(["run.sh" if name == "verl" else "geo3k.yaml"]) | given(OTHER_BRANCHES[name])
    for key in (each.theirs.replace(BELOW, ".any") for each in systems()[name].settings):
        for value in VALUES:
            try:
                translation = translate(systems()[name], run | given({key: value}), "geo3k")
                # writing takes twenty times as long, and reads the values by one check of the settings for all keys
                recipe_text(translation, []) if value == {"a": 1} else None
            except FoveaError as error:
                assert "\n" not in str(error), f"{key}={value}"  # noqa: PT017 (most values can be read)


@table(
    ("words", "left"),
    [
        (["data.train_batch_size=null"], "data.train_batch_size: null is not a positive integer"),
        (["data.train_batch_size=null"], f"{ACTOR}.ppo_mini_batch_size: read together with data.train_batch_size, wh"),
        ([f"{ACTOR}.ppo_mini_batch_size=0"], f"{ACTOR}.ppo_mini_batch_size: 0 is not a positive integer"),
        ([f"{ACTOR}.use_kl_loss=abc"], f'{ACTOR}.use_kl_loss: "abc" is not a boolean or null'),
        ([f"{ACTOR}.optim.lr_scheduler_type=[1]"], f"{ACTOR}.optim.lr_scheduler_type: only "),
        (["trainer.logger=0"], "trainer.logger: 0 is not a text or list of texts or null"),
        (["custom_reward_function.path=[1]"], "custom_reward_function.path: [1] is not a file"),
        (["data.truncation=left", "data.filter_overlong_prompts=False"], "data.truncation: prompts are never cut"),
        (
            [f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"],
            f"{ACTOR}.ppo_micro_batch_size_per_gpu: it counts completions, and is not a multiple of the group size 5",
        ),
    ],
)
def test_a_value_that_cannot_be_used_is_left_out(words: list[str], left: str) -> None:
    recipe = imported("run.sh", *words)
    assert f"#   {left}" in head_of(recipe)
    assert head_of(recipe).count(f"#   {words[0].partition('=')[0]}:") == 1, "told once, whoever reads it"
    assert resolved(recipe)["environment.name"] == "geo3k"


def test_what_is_read_together_with_it_is_not_guessed() -> None:
    """A default in its place would make another run."""
    assert not re.search("minibatches|prompts_per_step", imported("run.sh", "data.train_batch_size=abc"))


def test_gpus_that_meet_in_part_and_a_share_of_an_unknown_number_of_steps_are_not_guessed() -> None:
    recipe = imported("geo3k.yaml", f"{PLACEMENT}.actor=0-3", f"{PLACEMENT}.rollout=2-5")
    assert "#   actor.lr_sched.lr_warmup_fraction: it is a share of all steps, and their number is not set;" in recipe
    assert resolved(recipe)["train.lr_warmup_steps"] == 0
    assert f"{PLACEMENT}.rollout: no such placement exists here; set cluster.placement" in recipe
    assert resolved(recipe)["cluster.placement"] == "collocated"


def test_the_command_prints_a_page_and_the_readme_has_it() -> None:
    command = [sys.executable, "-m", "fovea_tools.importer.docs", "mixtrain"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == page(systems()["mixtrain"])
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    (row,) = [line for line in lines if "fovea_tools.importer.docs" in line]
    assert [system.name for system in systems().values() if system.name not in row.lower()] == []


@table("system", systems().values())
def test_a_page_has_every_setting_in_whole_rows_and_names_files_that_are_there(system: System) -> None:
    text = page(system)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {5}
    assert [setting.theirs for setting in system.settings if f"`{setting.theirs}`" not in text] == []
    named = set(re.findall(r"\b((?:docs|recipes)/[\w./-]+\.(?:md|yaml))\b", text))
    assert named
    assert sorted(file for file in named if not (ROOT / file).is_file()) == []
