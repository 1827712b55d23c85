"""What the words of `fovea eval` mean, and whose rows are asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fovea.cli.evaluate import sort_words
from fovea.commands.evaluate import EvalOptions, EvalSet, evaluate_targets
from fovea.commands.targets import Baseline, CheckpointTarget, ModelTarget, parse_target, parse_targets, shared_settings
from fovea.config.loading import dump_config
from fovea.config.model import Model
from fovea.config.recipes import shipped_recipe
from fovea.config.run import Config
from fovea.errors import ModelError
from fovea.models.load import load_network
from fovea.run.checkpoint import FORMAT, write_manifest
from fovea_gym.errors import ConfigError
from fovea_gym.utils import http_json
from gym_tests.images import encoded, noise
from gym_tests.rows.web import served
from gym_tests.tables import table
from tests.tiny_models import save, tiny

TINY = {"model": {"tiny": {}}}


def make_run(folder: Path, steps: tuple[int, ...] = (2, 10), **settings: object) -> Path:
    """A run folder, as far as targets look at it."""
    for step in steps:
        checkpoint = folder / "checkpoints" / f"step-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(json.dumps({"format": FORMAT, "step": step}))
        write_manifest(checkpoint)
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(Config.model_validate(TINY | settings)))
    return folder


def test_words_are_targets_and_settings(in_tmp_path: None) -> None:
    Path("lr=1").mkdir()
    words = ["runs/x", "seed=1", r"constant:\boxed{a=b}", "lr=1", "evaluate.test_size=3", "org/name@v1"]
    targets, settings = sort_words(words)
    assert targets == ["runs/x", r"constant:\boxed{a=b}", "lr=1", "org/name@v1"]
    assert settings == ["seed=1", "evaluate.test_size=3"]
    with pytest.raises(ConfigError, match="no target given"):
        sort_words(["seed=1"])


def test_baselines_and_hub_ids() -> None:
    for word in ("majority", "gold", "constant:no idea"):
        assert parse_target(word) == Baseline(name=word)
    assert parse_target("org/name-2B") == ModelTarget(name="org/name-2B", path="org/name-2B")
    assert parse_target("org/name@abc123") == ModelTarget(name="org/name@abc123", path="org/name", revision="abc123")
    for word in ("nonsense", "./org/name", "/org/name", "a/b/c"):
        with pytest.raises(ConfigError, match="no such folder; a target is a run, a checkpoint"):
            parse_target(word)


@table(
    ("word", "message"),
    [
        # the form of a hub id, and would be asked for at the hub
        ("runs/shaeps", r"\bruns/shapes\?$"),
        ("runs/shaeps/checkpoints/step-2", r"\bruns/shapes\?$"),
        ("./runs/shaeps", r"\bruns/shapes\?$"),
        ("rums/shapes/checkpoints", r"\bruns\?$"),
        ("runs/qwen3-vl-2b", "no such folder; a target is a run"),
        *((name, r"a file\b") for name in ("runs/shapes/config.yaml", "./runs/shapes/config.yaml", "notes.txt")),
        ("geo3k", r"\brecipe=geo3k\b"),
    ],
)
def test_a_name_below_a_folder_a_file_and_a_recipe_are_no_targets(word: str, message: str, in_tmp_path: None) -> None:
    if not Path("runs").exists():
        make_run(Path("runs/shapes"))
    Path("notes.txt").touch()
    with pytest.raises(ConfigError, match=rf"^{word}: .*{message}"):
        parse_target(word)
    assert parse_target("Qwen/Qwen3-VL-2B-Instruct").name == "Qwen/Qwen3-VL-2B-Instruct"


def test_a_run_is_its_newest_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    newest = parse_target(str(run))
    assert newest == CheckpointTarget(name=f"{run} step 10", folder=run / "checkpoints" / "step-10", run=run)
    chosen = parse_target(str(run / "checkpoints" / "step-2"))
    assert isinstance(chosen, CheckpointTarget)
    assert (chosen.folder.name, chosen.run) == ("step-2", run.resolve())
    with pytest.raises(ConfigError, match="step 10: "):
        parse_targets([str(run), "majority", f"{run}/"])
    (run / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"\bconfig\.yaml\b"):
        parse_target(str(run / "checkpoints" / "step-2"))
    with pytest.raises(ConfigError, match="neither a run with a checkpoint, nor a checkpoint, nor a model folder"):
        parse_target(str(make_run(tmp_path / "young", steps=())))


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    assert parse_target(str(tmp_path)) == ModelTarget(name=str(tmp_path), path="org/base", adapter=tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="names no base model"):
        parse_target(str(tmp_path))


def test_rows_are_those_of_the_first_run_or_of_the_recipe(tmp_path: Path) -> None:
    easy = make_run(tmp_path / "easy", seed=4)
    hard = make_run(tmp_path / "hard", environment={"name": "shapes", "level": 3})
    targets = [parse_target(word) for word in ("majority", str(easy))]
    config = shared_settings(targets, None, ["evaluate.test_size=5"])
    assert (config.seed, config.evaluate.test_size) == (4, 5)
    both = [*targets, parse_target(str(hard))]
    with pytest.raises(ConfigError, match=r"\benvironment\.level: 1 and 3\b"):
        shared_settings(both, None, [])
    assert shared_settings(both, None, ["environment.level=2"]).environment.level == 2  # type: ignore[union-attr]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {tiny: {}}\nseed: 9\n")
    assert shared_settings(both, recipe, []).seed == 9
    with pytest.raises(ConfigError, match=r"\(recipe=FILE,"):
        shared_settings(targets[:1], None, [])
    # runs with different rewards need a recipe
    first, second = make_run(tmp_path / "own", reward="mine.py:score"), make_run(tmp_path / "other")
    targets = parse_targets([str(first), str(second)])
    with pytest.raises(ConfigError, match=r"\breward: mine\.py:score and None\b"):
        shared_settings(targets, None, [])
    assert shared_settings(targets, second / "config.yaml", []).reward is None
    assert shared_settings(targets, None, ["reward=ours.py:score"]).reward == "ours.py:score"


LOAD = """
from fovea.config.run import Model
from fovea.models.load import load_network
for revision in (None, "v1"):
    network = load_network(Model(path="org/tiny", revision=revision))
    print(float(network.lm_head.weight.double().sum()))
"""


def test_a_revision_pins_the_model(tmp_path: Path) -> None:
    """Two commits in a cache of the hub's own layout: main is the second, the first is asked for by its tag."""
    hub, sums = tmp_path / "hub" / "models--org--tiny", []
    (hub / "refs").mkdir(parents=True)
    for seed, (commit, ref) in enumerate({"a" * 40: "v1", "b" * 40: "main"}.items()):
        parts = tiny("qwen3_vl", seed=seed)
        save(parts, hub / "snapshots" / commit)
        (hub / "refs" / ref).write_text(commit)
        sums.append(float(parts.network.get_submodule("lm_head").weight.detach().double().sum()))  # type: ignore[union-attr, operator]
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == pytest.approx(sums[::-1])
    assert sums[0] != pytest.approx(sums[1])


def test_a_folder_and_a_tiny_model_have_no_revisions(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="only hub ids have revisions"):
        load_network(Model(path=str(tmp_path), revision="v1"))
    with pytest.raises(ValueError, match=r"\bmodel\.tiny\b"):
        Model.model_validate({"tiny": {}, "revision": "v1"})


def test_images_are_fetched_and_converted_as_the_settings_say(tmp_path: Path) -> None:
    printed = encoded(noise(1).convert("CMYK"), "JPEG")
    with served({"/printed.jpg": printed}) as site:
        row = {"problem": "<image>Find x.", "images": [f"{site.url}/printed.jpg"], "answer": "3"}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        files = [str(tmp_path / "rows.jsonl")]
        environment = {"name": "geo3k", "train_files": files, "test_files": files}
        data = {"allow_private_addresses": True, "convert_images": ["cmyk"]}
        settings = {"run_dir": str(tmp_path / "run"), "environment": environment, "data": data}
        rows = EvalSet.of(Config.model_validate(TINY | settings), "test")
        images = [rows.open_image(rows.tasks[0].images[0]) for _ in range(2)]
    assert [image.mode for image in images] == ["RGB", "RGB"]
    assert site.asked == ["/printed.jpg"], "a run keeps what a URL has sent"


def test_servers_are_asked_before_any_row_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> EvalSet:
        raise AssertionError("rows were read first")

    monkeypatch.setattr(http_json, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(EvalSet, "of", read)
    targets = ["gold", "http://127.0.0.1:9"]
    with pytest.raises(ConfigError, match=r"^http://127\.0\.0\.1:9: "):
        evaluate_targets(targets, [], EvalOptions(recipe=shipped_recipe("shapes"), quiet=True))
