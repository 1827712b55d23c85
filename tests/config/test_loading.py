from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fovea.config.loading import dump_config, load_config
from fovea.config.model import Lora, Model, TinyModel
from fovea.config.recipes import parse_override
from fovea.config.run import Config
from fovea.config.sections import Warmup
from fovea_gym.errors import ConfigError
from fovea_gym.making import make
from fovea_gym.settings.base import Section, sections_of, variants_of
from fovea_gym.settings.environments import Geo3kEnvironment, OwnEnvironment, ShapesEnvironment
from gym_tests.tables import table

ROOT = Path(__file__).parents[2]
NEST = "in files and mappings, write nested sections instead of dots:"
NO_TEXT = "is not text, which a setting's name must be; put it in quotes"
ONE_MODEL = "model: set exactly one of model.path (a folder or hub id) and model.tiny (a small model made here)"
PLAIN = "a value is text, a finite number, true, false, null, a list, or a mapping with text keys"
UNFIT = "null does not fit; allowed: "
SEEDS = "does not fit; allowed: integer >= 0 and < 4294967296"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small sound recipe, in a separate folder, named relative to it."""
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    path = Path("recipes/small.yaml")
    path.write_text("seed: 3\nmodel:\n  tiny: {num_layers: 2}\nenvironment: {level: 2}\n", encoding="utf-8")
    return path


def error_of(recipes: list[Path], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(recipes, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Layers


def test_later_layers_win_key_by_key_also_in_sections_that_are_off(recipe: Path) -> None:
    config = load_config([recipe], [])
    assert config == Config(seed=3, model=Model(tiny=TinyModel(num_layers=2)), environment=ShapesEnvironment(level=2))
    Path("over.yaml").write_text("seed: 4\nmodel: {tiny: {num_heads: 4}}\n", encoding="utf-8")
    config = load_config([recipe, Path("over.yaml")], ["model.tiny.num_layers=5"])
    assert (config.seed, config.model.tiny) == (4, TinyModel(num_layers=5, num_heads=4))
    config = load_config([recipe], ["model.lora.rank=8", "warmup={}"])
    assert (config.model.lora, config.warmup) == (Lora(rank=8), Warmup())


@table(("override", "rate"), [("1e-4", 1e-4), ("1.0e-4", 1e-4), (".5", 0.5), ("1", 1.0), ("1E+2", 100.0)])
def test_numbers_as_people_write_them_and_other_values_are_text(recipe: Path, override: str, rate: float) -> None:
    assert load_config([recipe], [f"train.learning_rate={override}"]).train.learning_rate == rate
    for text in ("2026-11-21", "1e-6 and more", "runs/lr=1"):
        assert load_config([recipe], [f"run_dir={text}"]).run_dir == text


@table("override", ["max_hours=1:30", "max_hours=1:30.5", "max_steps=0100", "seed=-010", "seed=1:00:00"])
def test_numbers_of_other_bases_are_text(recipe: Path, override: str) -> None:
    """YAML 1.1 has 1:30 as 90, which would be hours, and 0100 as 64."""
    key, _, value = override.partition("=")
    fix = "" if ":" in value else "; write it without leading zeros"
    with pytest.raises(ConfigError, match=f'{key}: "{value}" does not fit; allowed: .*{fix}$'):
        load_config([recipe], [override])
    assert load_config([recipe], [f"run_dir={value}"]).run_dir == value


def test_the_fast_path_is_off_as_it_is_written(recipe: Path) -> None:
    """Without the quotes that YAML wants for the word."""
    Path("over.yaml").write_text("model: {fast_path: off}\n", encoding="utf-8")
    for config in (load_config([recipe], ["model.fast_path=off"]), load_config([recipe, Path("over.yaml")], [])):
        assert config.model.fast_path == "off"
        assert Config.model_validate(parse_override(f"x={dump_config(config)}")["x"]) == config


def test_null_turns_a_section_or_mapping_off_and_starts_it_over(recipe: Path) -> None:
    weights, lora = "data: {kind_weights: {counting: 2, shape: 3}}", "model: {lora: {rank: 4, alpha: 5}}"
    Path("over.yaml").write_text(f"{weights}\nwarmup: {{batch_size: 7}}\n{lora}\n", encoding="utf-8")
    recipes = [recipe, Path("over.yaml")]
    config = load_config(recipes, ["warmup=null", "model.lora=null", "model.lora.rank=8"])
    assert (config.warmup, config.model.lora) == (None, Lora(rank=8))
    assert load_config(recipes, ["data.kind_weights.shape=1"]).data.kind_weights == {"counting": 2, "shape": 1}
    anew = load_config(recipes, ["data.kind_weights=null", "data.kind_weights.shape=1"])
    assert anew.data.kind_weights == {"shape": 1}


def test_another_environment_or_model_drops_the_keys_of_the_first(recipe: Path) -> None:
    overrides = ["environment.name=geo3k", "environment.train_files=[a]", "environment.test_files=[b]"]
    for ordered in (overrides, overrides[::-1]):
        chosen = load_config([recipe], ordered).environment
        assert chosen == Geo3kEnvironment(train_files=("a",), test_files=("b",))
    assert load_config([recipe], ["environment.name=shapes"]).environment == ShapesEnvironment(level=2)
    assert load_config([recipe], ["model.path=folder", "model.tiny=null"]).model == Model(path="folder")


ENVIRONMENTS = (
    "shapes | shapes_small | grounding_shapes | geo3k | vqa | caption | rows | geospot | grounding | gymnasium | "
    "openenv | nemo_gym | own | mixture | frozen_lake | pages | shapes_zoom | sokoban"
)
BOOLEAN = "YAML reads yes, no, on and off as true and false; to give a text, write '\"yes\"'"
LISTED, OR_NULL = "`fovea config {}` lists them", "group of settings or null;"


@table(
    ("key", "near"),
    [
        ("rollout.top_pp", "rollout.top_p"),
        ("top_p", "rollout.top_p or evaluate.top_p"),
        ("train.temperature", "rollout.temperature or evaluate.temperature"),
        ("rolout.tpo_p", "rollout.top_p"),
        ("learning_rate", "train.learning_rate or warmup.learning_rate or algorithm.advantage.critic.learning_rate"),
        ("xyz.abc", ""),
        ("a..b", ""),
    ],
)
def test_what_an_unknown_key_is_told(recipe: Path, key: str, near: str) -> None:
    hint = f"did you mean {near}?" if near else "`fovea config` lists them all"
    assert error_of([recipe], f"{key}=1") == f"command line: {key}: no such setting; {hint}"


@table(
    ("override", "shown", "allowed"),
    [
        ("rollout.top_p=1.5", "1.5", "number > 0 and <= 1"),
        ("rollout.top_p='0.5'", '"0.5"', "number > 0 and <= 1; without the quotes it is a number"),
        ("rollout.temperature=1e-45", "1e-45", "number >= 1e-06"),
        ("rollout.top_p=high", '"high"', "number > 0 and <= 1"),
        ("seed=true", "true", "integer >= 0 and < 4294967296"),
        ("seed=1.5", "1.5", "integer >= 0 and < 4294967296"),
        ("threads=0", "0", "integer >= 1 and <= 1024 or null"),
        ("run_dir=5", "5", "text; to give it as text, write '\"5\"'"),
        ("run_dir=", "null", "text"),
        ("run_dir=yes", "true", f"text; {BOOLEAN}"),
        ("resume=yes", "true", "never | auto or text; true is resume=auto here"),
        ("resume=false", "false", "never | auto or text; false is resume=never here"),
        ("rollout.stop=x", '"x"', "list of text; write [x]"),
        ("train.betas=[1]", "[1]", "list of 2, each number >= 0 and < 1"),
        ("data.kind_weights.shape=-1", "-1", "number > 0"),
        ("data.kind_weights=3", "3", "mapping of text to number > 0"),
        ("rollout=3", "3", f"group of settings; {LISTED.format('rollout')}"),
        ("model.lora=3", "3", f"{OR_NULL} model.lora={{}} takes the defaults, {LISTED.format('model.lora')}"),
        ("model.lora.rank=0", "0", "integer >= 1 and <= 8192"),
        ("environment.name=maze", '"maze"', ENVIRONMENTS),
    ],
)
def test_what_an_unfit_value_is_told(recipe: Path, override: str, shown: str, allowed: str) -> None:
    key = override.partition("=")[0]
    assert error_of([recipe], override) == f"command line: {key}: {shown} does not fit; allowed: {allowed}"


@table(
    ("override", "message"),
    [
        ("seed", "seed: an override is written key=value, such as seed=1"),
        ("=1", "=1: an override is written key=value, such as seed=1"),
        ("seed=[", "seed: not valid YAML: expected the node content, but found '<stream end>'"),
        ("rollout.top_p.x=1", 'rollout.top_p: {"x": 1} does not fit; allowed: number > 0 and <= 1'),
        ("seed=.inf", f"seed: inf does not fit; {PLAIN}"),
        ("data.kind_weights={1: 2}", f"data.kind_weights: {{1: 2}} does not fit; {PLAIN}"),
        (
            "peft_config.r=8",
            "peft_config.r: no such setting; TRL's peft_config is model.lora here (r is rank, lora_alpha alpha, "
            "lora_dropout dropout, target_modules targets)",
        ),
        ("environment.name=geo3k", "environment.train_files: must be set; allowed: list of text"),
        (
            "environment.train_files=[a]",
            "environment.train_files: a setting of environment.name=geo3k | vqa | caption | rows | geospot | grounding "
            "| nemo_gym only; drop it, or add environment.name=geo3k",
        ),
        (
            "model.path=folder",
            "model.path is set, but recipes/small.yaml sets model.tiny and a run has one model; add model.tiny=null",
        ),
    ],
)
def test_what_a_bad_override_is_told(recipe: Path, override: str, message: str) -> None:
    assert error_of([recipe], override) == f"command line: {message}"


@table(
    ("environment", "message"),
    [
        ({"name": "shapes", "level": [1, 1]}, "level=[1, 1] names a level twice"),
        ({"name": "vqa", "train_files": ["a"]}, "test_files: must be set, or {}test_share=0.1"),
        ({"name": "frozen_lake", "state_reward": 1.0}, "state_reward is for descriptions in a thought, but {}think="),
        ({"name": "mixture", "parts": {}}, "parts is empty, so there are no rows"),
        ({"name": "vqa", "train_files": ["a"], "test_share": 0.1, "prompt_template": "a.json"}, "prompt_template='"),
    ],
)
def test_an_error_of_the_gym_has_the_names_of_the_recipe_in_a_run_and_its_own_elsewhere(
    environment: dict[str, Any], message: str
) -> None:
    def error_in_run(chosen: dict[str, Any]) -> str:
        return error_of([], "model.tiny={}", f"environment={json.dumps(chosen)}")

    named = f"environment.{message.format('environment.')}"
    assert error_in_run(environment).startswith(f"command line: {named}")
    name, settings = environment["name"], {key: value for key, value in environment.items() if key != "name"}
    with pytest.raises(ConfigError) as error:
        make(name, **{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})
    assert str(error.value).startswith(f"{name}: {message.format('')}")
    part = error_in_run({"name": "mixture", "parts": {"a": {"environment": environment}}})
    assert name == "mixture" or part.startswith(f"command line: environment.parts.a: {named}")


def test_an_override_of_another_environment_is_never_dropped_and_what_a_choice_dropped_is_named(recipe: Path) -> None:
    told = error_of([recipe], "environment.zoom=true", "environment.name=geo3k")
    assert told.startswith("command line: environment.zoom: a setting of environment.name=shapes_small only; drop it")
    sets = "environment: {name: vqa, train_files: [a.jsonl], test_share: 0.1}\n"
    recipe.write_text(f"model: {{tiny: {{}}}}\n{sets}", encoding="utf-8")
    chosen = "environment.name=caption dropped what recipes/small.yaml had set there"
    assert error_of([recipe], "environment.name=caption") == (
        f'command line: environment.train_files: must be set; {chosen} (environment.train_files=["a.jsonl"], '
        "environment.test_share=0.1): set again what should stay"
    )
    told = error_of([recipe], "environment.name=caption", "environment.train_files=[a.jsonl]")
    assert told.startswith("recipes/small.yaml and command line: environment.test_files: must be set, or environment.")
    assert told.endswith(f"; {chosen} (environment.test_share=0.1): set again what should stay")


def test_a_tiny_model_over_a_path_is_told_how(recipe: Path) -> None:
    recipe.write_text("model: {path: folder}\n", encoding="utf-8")
    told = "model.tiny is set, but recipes/small.yaml sets model.path and a run has one model; add model.path=null"
    for override in ("model.tiny={}", "model.tiny.num_layers=2"):
        assert error_of([recipe], override) == f"command line: {told}"


INVALID = "not valid YAML:"


@table(
    ("content", "message"),
    [
        ("seed: 1\nseed: 2\n", f" line 2: {INVALID} seed is written twice"),
        ("data:\n  kind_weights:\n    a: 1\n    a: 2\n", f" line 4: {INVALID} a is written twice"),
        ("seed: 1\n b: 2\n", f" line 2: {INVALID} mapping values are not allowed here"),
        ("seed: 1\nthreads\n\n# four\nmax_steps: 3\n", f" line 2: {INVALID} could not find expected ':'"),
        (
            "model:\n  path tiny\n  dtype: float32\n",
            f" line 3: {INVALID} mapping values are not allowed here (or line 2 lacks its colon)",
        ),
        (
            "model:\n  path tiny\n  # a comment\n  dtype: float32\n",
            f" line 4: {INVALID} expected <block end>, but found '<block mapping start>' (or line 2 lacks its colon)",
        ),
        ("seed: 'open\nthreads: 1\n", f" line 1: {INVALID} found unexpected end of stream"),
        (
            "seed: 1\ndata: {on_bad_row: skip\nthreads: 1\nmax_steps: 3\n",
            f" line 3: {INVALID} expected ',' or '}}', but got ':' (in the value that begins on line 2)",
        ),
        ("seed: 1\nrun_dir: [\n\n\n", f" line 2: {INVALID} expected the node content, but found '<stream end>'"),
        (
            "seed: !!python/name:os.system\n",
            f" line 1: {INVALID} could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system'",
        ),
        ("a: &a\n  b: *a\n", f" line 1: {INVALID} found unconstructable recursive node"),
        (f"a: {'[' * 3000}", ": is nested too deeply to be read; flatten it"),
        ("seed: !!bool abc\n", f": {INVALID} a value does not fit its form or tag ('abc')"),
        (
            f"seed: {'1' * 5000}\n",
            f": {INVALID} a value does not fit its form or tag (Exceeds the limit (4300 digits) for integer string "
            "conversion: value has 5000 digits)",
        ),
        ("", ": a recipe is a mapping of settings, but it is empty; write lines such as `seed: 0`"),
        ("- a\n", ': a recipe is a mapping of settings, but it holds ["a"]; write lines such as `seed: 0`'),
        (
            "rollout: {top_pp: 1, top_kk: 2}\n",
            ": rollout.top_pp: no such setting; did you mean rollout.top_p?; also: rollout.top_kk: no such setting; "
            "did you mean rollout.top_k?",
        ),
        ("rollout: {engine.name: vllm}\n", f": rollout.engine.name: {NEST} engine: {{name: ...}}"),
        ("train.learning_rate: 1\n", f": train.learning_rate: {NEST} train: {{learning_rate: ...}}"),
        ("rollout.engine: {name: vllm}\n", f": rollout.engine: {NEST} rollout: {{engine: ...}}"),
        ("train.backend: megatron\n", f": train.backend: {NEST} train: {{backend: ...}}"),
        ("rollout.top_pp: 1\n", ": rollout.top_pp: no such setting; did you mean rollout.top_p?"),
        ("train: {1: 2}\n", f": train: the key 1 {NO_TEXT}"),
        ("train: {backend: {on: 2}}\n", f": train.backend: the key true (on and yes are read as true) {NO_TEXT}"),
        ("off: 2\n", f": the key false (off and no are read as false) {NO_TEXT}"),
        ("modle: {path: a, tiny: null}\n", ": modle: no such setting; did you mean model?"),
        ("model: {path: a}\nrollout:\n", f": rollout: {UNFIT}group of settings; {LISTED.format('rollout')}"),
        ("model: {path: a}\nseed: -1\n", f": seed: -1 {SEEDS}"),
        ("seed: -1\n", f": seed: -1 {SEEDS}; also: {ONE_MODEL}"),
        ("seed: 1\n", f": {ONE_MODEL}"),
    ],
)
def test_what_a_bad_recipe_is_told(recipe: Path, content: str, message: str) -> None:
    recipe.write_text(content, encoding="utf-8")
    assert error_of([recipe]) == f"recipes/small.yaml{message}"


def test_all_problems_are_named_at_once_each_with_its_source(recipe: Path) -> None:
    steps = "max_steps: 0 does not fit; allowed: integer >= 1"
    assert error_of([recipe], "train.learning_rate=-1", "rollout.samples_per_prompt=0", "max_steps=0") == (
        f"command line: {steps}; also: rollout.samples_per_prompt: 0 does not fit; allowed: integer >= 1 and <= 131072"
        "; also: train.learning_rate: -1 does not fit; allowed: number > 0 and <= 100"
    )
    unknown = error_of([recipe], "rollout.top_pp=1", "train.seeed=2", "algorithm.clip_high=0.3")
    assert unknown.startswith("command line: rollout.top_pp: no such setting; did you mean rollout.top_p?; also: train")
    assert unknown.endswith("; also: algorithm.clip_high: no such setting; did you mean algorithm.loss.clip_high?")
    over = Path("over.yaml")
    over.write_text("rollout: {top_p: 2}\nalgorithm: {minibatches: 50}\n", encoding="utf-8")
    assert error_of([recipe, over]).startswith("over.yaml: rollout.top_p: 2 does not fit")
    told = "recipes/small.yaml and over.yaml and command line: algorithm.minibatches=50 is more than"
    assert error_of([recipe, over], "rollout.top_p=1").startswith(told)
    recipe.write_text("model: {path: a}\nseed: -1\n", encoding="utf-8")
    told = f"recipes/small.yaml: seed: -1 {SEEDS}; also: command line: {steps}"
    assert error_of([recipe], "max_steps=0") == told


HOSTS = ("http://[::1/v1", "http://a:99999", "http://a:0", "http://a:b", "http://", "ftp://a", "a", "http://10.0.0.256")


@table("url", HOSTS)
def test_an_address_that_cannot_be_called(url: str) -> None:
    caption = "environment={name: caption, train_files: [a], test_files: [b], metric_weights: {judge: 1}}"
    of_judge = error_of([], "model.tiny={}", caption, "judge.model=m", f"judge.url={url}")
    assert of_judge.endswith("does not fit; allowed: text such as http://HOST:PORT/v1")
    servers = ["rollout.engine=vllm_servers", "rollout.engine.weights_dir=w", f'rollout.engine.servers=["{url}"]']
    told = error_of([], "model.tiny={}", *servers)
    assert told.endswith("does not fit; allowed: list of text such as http://HOST:PORT")


@table("key", [1, True, None, 1.5, (1, 2)])
def test_a_mapping_of_python_has_texts_as_keys_too(key: object) -> None:
    with pytest.raises(ConfigError, match=r"^arguments: train: the key "):
        load_config([], [{"train": {key: 2}}])


def test_the_nearest_of_many_recipes_are_named(recipe: Path) -> None:
    for name in (".pre-commit-config", "abc", "othello", "others-of", "small2", "small3"):
        Path("recipes", f"{name}.yaml").touch()
    told = "the nearest names are recipes/othello.yaml, recipes/others-of.yaml, recipes/small3.yaml; `fovea recipes`"
    assert error_of([Path("recipes/oth.yaml")]).startswith(f"recipes/oth.yaml: no such recipe; {told}")


@table(
    ("name", "message"),
    [
        ("recipes/smal.yaml", "no such recipe; did you mean recipes/small.yaml?"),
        ("recipes/small", "no such recipe; did you mean recipes/small.yaml?"),
        ("small", "no such recipe; did you mean recipes/small.yaml?"),
        ("recipes/other.yaml", "no such recipe; there are recipes/small.yaml; `fovea recipes` lists others"),
        ("none/small.yaml", "no such recipe; no *.yaml in none/; `fovea recipes` lists others"),
        ("recipes", "a folder, not a recipe; there are recipes/small.yaml; `fovea recipes` lists others"),
    ],
)
def test_what_a_missing_recipe_is_told(recipe: Path, name: str, message: str) -> None:
    assert error_of([Path(name)]) == f"{name}: {message}"


def test_a_class_of_a_file_stands_for_a_section(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("model: {tiny: {}}\nenvironment: my/env.py:Mine\n", encoding="utf-8")
    from_recipe = load_config([recipe], ["environment.settings.level=3"]).environment
    assert from_recipe == OwnEnvironment(file="my/env.py:Mine", settings={"level": 3})
    # as a choice of another variant it drops what the recipe set for the old one, wherever it is written
    recipe.write_text("model: {tiny: {}}\nenvironment: {name: shapes, level: 2}\n", encoding="utf-8")
    overrides = ["environment.settings.level=3", "environment=my/env.py:Mine"]
    assert load_config([recipe], overrides).environment == from_recipe
    with pytest.raises(ConfigError, match="environment"):
        load_config([recipe], ["environment=geo3k"])


def test_a_recipe_may_come_through_a_pipe(tmp_path: Path) -> None:
    code = "from pathlib import Path; from fovea.config import recipes; print(recipes.read_recipe(Path('/dev/stdin')))"
    done = subprocess.run([sys.executable, "-c", code], input="seed: 7\n", capture_output=True, text=True, check=False)
    assert done.stdout == "{'seed': 7}\n", done.stderr
    for content, told in ((b"#" * 2**21, "larger than 1 MiB"), (b"seed: \xff\n", "not valid YAML: ")):
        (tmp_path / "bad.yaml").write_bytes(content)
        assert told in error_of([tmp_path / "bad.yaml"])


def test_an_unknown_setting_is_near_none_of_an_unchosen_environment() -> None:
    shapes = [ROOT / "recipes/shapes.yaml"]
    assert "reward_min_val" not in error_of(shapes, "environment.reward_mim_val=5"), "of another environment"
    assert "did you mean environment.image_side_px?" in error_of(shapes, "environment.image_side=5")


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
