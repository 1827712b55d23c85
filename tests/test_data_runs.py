"""Runs on data as users have it: public layouts, bad rows, epochs, published recipes, and sessions that fail."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.commands.dry_run import plan
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.data.bad_rows import BAD_ROWS_FILE
from fovea.errors import TrainError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.metrics.progress import CONSOLE_FILE
from fovea.report.summary import Summary
from fovea.run.context import Run
from fovea.run.lifecycle import begin
from fovea.wiring import images
from fovea.wiring.run import build
from fovea_gym.errors import DataError, SessionError
from fovea_gym.types import ImageRef, Message, Task
from fovea_gym.utils.event_loop import wait_for
from gym_tests.bad_files import FILES, write
from gym_tests.environments.files import COLOURS, row, square
from gym_tests.images import encoded, noise
from gym_tests.rows.web import served
from tests.data.small import SMALL
from tests.failing_sessions import SETTINGS, WARMUP, Door, Doors
from tests.runs import HASH_REWARD, ROOT

SHARED = ROOT.parent / "shared" / "data"

PHOTOS = ["environment.level_key=null", "curriculum.level_weights=[]", "curriculum.enabled=false", "warmup=null"]


def trained(folder: Path, files: tuple[Path, Path], *settings: str, recipe: str = "geo3k") -> Summary:
    own = [f"run_dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]
    own += [f"environment.train_files=['{files[0]}']", f"environment.test_files=['{files[1]}']"]
    if recipe == "geo3k":
        own += [f"environment.dev_files=['{files[0]}']"]
    return train(build(load_config([ROOT / "recipes" / f"{recipe}.yaml"], [*SMALL, *own, *settings])))


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (("geo3k/fixture_train.parquet", "geo3k/fixture_test.parquet"), []),
        (("geo3k/fixture_verl_train.parquet", "geo3k/fixture_verl_test.parquet"), ["environment.system_prompt=null"]),
        (("geo3k/train.parquet", "geo3k/validation.parquet"), []),
        (("vqa/fixture_train.parquet", "vqa/fixture_test.parquet"), ["environment.kind_key=question_type"]),
        (("vqa/nlvr_vqa_train.parquet", "vqa/fixture_test.parquet"), []),
        (("geospot/osv5m_fixture24.parquet", "geospot/osv5m_fixture24.parquet"), PHOTOS),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_public_files_train_and_are_read_by_eval(names: tuple[str, str], settings: list[str], tmp_path: Path) -> None:
    files = (SHARED / names[0], SHARED / names[1])
    if not all(file.exists() for file in files):
        pytest.skip(f"the shared data files are not here ({SHARED})")
    recipe = "geospot" if names[0].startswith("geospot") else "geo3k"
    summary = trained(tmp_path, files, *settings, recipe=recipe)
    assert summary.final is not None
    assert (summary.steps, summary.final.num_rows) == (2, 4)
    metrics = read_metrics(tmp_path / "run")
    assert [row["data/rows_skipped"] for row in metrics] == [0, 0]
    assert all(row["grad_norm"] > 0 for row in metrics)
    report = tmp_path / "eval.json"
    done = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), "--json", str(report)])
    assert done.exit_code == 0, done.output
    (target,) = json.loads(report.read_text())["targets"]
    assert (target["accuracy"]["mean"], target["accuracy"]["n"]) == (summary.final.accuracy, 4)


RLINF = [{"problem": "<image>Find x.", "answer": rf"so \boxed{{{n}}}"} for n in range(6)]
SAID = [[("human", "<image>Who is it?"), ("gpt", f"Number {n}.")] for n in range(6)]
POKEMON = [{"conversations": [{"from": who, "value": text} for who, text in turns]} for turns in SAID]
ASKED = [{"role": "system", "content": "Think."}, {"role": "user", "content": "<image>Find x."}]
VERL = [
    {"data_source": "d", "prompt": ASKED, "extra_info": {"index": n}}
    | {"reward_model": {"style": "rule", "ground_truth": str(n)}}
    for n in range(6)
]


@pytest.mark.parametrize(("rows", "answer"), [(RLINF, "3"), (POKEMON, "Number 3."), (VERL, "3")])
def test_public_layouts_train_without_a_setting(rows: list[dict[str, Any]], answer: str, tmp_path: Path) -> None:
    with_images = [row | {"images": [{"bytes": encoded(noise(n)), "path": None}]} for n, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(with_images), tmp_path / "rows.parquet")
    config = [*SMALL, f"run_dir={tmp_path / 'run'}", "environment.system_prompt=null"]
    config += [f"environment.{split}_files=['{tmp_path / 'rows.parquet'}']" for split in ("train", "dev", "test")]
    run = build(load_config([ROOT / "recipes" / "geo3k.yaml"], config))
    task = run.sources.train.tasks[3]
    assert (task.answer, len(task.images)) == (answer, 1)
    assert train(run).steps == 2


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


WEB = [
    *("data.on_bad_row=skip", "data.allow_private_addresses=true", "data.url_timeout_seconds=1"),
    *("data.max_image_mib=1", "data.max_prompt_tokens=400", "environment.system_prompt=null"),
    *("data.convert_images=[]", "evaluate.test_size=null"),
]


def by_reason(metrics: dict[str, float]) -> dict[str, float]:
    prefix = "data/rows_skipped/"
    return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}


def test_a_file_with_every_kind_of_bad_row_trains_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # one server has all the bad rows, each with a separate reason
    monkeypatch.setattr(images, "HOST_PAUSE_SECONDS", 0.0)
    folder = tmp_path / "data"
    folder.mkdir()
    with served({"/far.png": encoded(noise(5))}) as site:
        reasons = write(folder, site.url)
        assert len(reasons) >= 30
        files = (folder / "bad.jsonl", folder / "bad.jsonl")
        settings = [*WEB, f"data.cache_dir={tmp_path}", "evaluate.shared_images=count", "rollout.prompts_per_step=6"]
        summary = trained(tmp_path, files, *settings, "max_steps=6", "checkpoint.every_steps=2")
        found = lines_of(tmp_path / "run" / BAD_ROWS_FILE)
        assert {row["row"]: row["reason"] for row in found} == reasons
        assert len(found) == len(reasons), "once each, though train, dev and test read the same file"
        metrics = read_metrics(tmp_path / "run")[-1]
        assert metrics["data/rows_skipped"] == len(reasons)
        assert by_reason(metrics) == Counter(reasons.values())
        assert summary.final is not None
        assert summary.final.num_rows == 8, "the good rows"
        assert all(row["error"].startswith(row["row"]) and "\n" not in row["error"] for row in found)
        trained(tmp_path, files, *settings, "max_steps=8", "resume=auto")
        assert lines_of(tmp_path / "run" / BAD_ROWS_FILE) == found
        assert by_reason(read_metrics(tmp_path / "run")[-1]) == Counter(reasons.values())


@pytest.mark.parametrize("name", ["cmyk.jpg", "half.png"])
def test_by_default_the_first_bad_row_ends_the_run_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name][0])
    (tmp_path / "a.jsonl").write_text(json.dumps({"problem": "How many?", "answer": "1", "images": [name]}))
    with pytest.raises(DataError, match=rf"a.jsonl line 1, image 1 \(.*{name}\): .*; .*, or set data.on_bad_row=skip"):
        trained(tmp_path, (tmp_path / "a.jsonl", tmp_path / "a.jsonl"))


def test_photos_train_turned_as_their_exif_orientation_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "turned.jpg").write_bytes(FILES["turned.jpg"][0])
    (tmp_path / "upright.png").write_bytes(encoded(noise(1)))
    names = ["turned.jpg"] + ["upright.png"] * 4
    rows = [{"problem": "?", "answer": "1", "images": [name]} for name in names]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trained(tmp_path, (tmp_path / "a.jsonl", tmp_path / "a.jsonl"), "log.progress=true")
    assert read_metrics(tmp_path / "run")[-1]["data/rows_skipped"] == 0
    assert capsys.readouterr().out.count("1 of 5 images turned by EXIF (5 of 5 training rows looked at)") == 1


REWARD = """
from pathlib import Path

def score(task, text, images):
    with Path(__file__).with_name("scored").open("a") as file:
        file.write(f"{task.row['n']}\\n")
    return 0.5
"""


def counting_rows(folder: Path, *settings: str, num_rows: int = 5, num_bad: int = 1) -> Config:
    """A run on so many usable rows whose reward writes down each row that it scores."""
    rows: list[dict[str, object]] = [{"n": n, "problem": f"How many {n}?", "answer": "1"} for n in range(num_rows)]
    # the last row is bad: its image is not there
    rows += [{**rows[0], "image": "no"}] * num_bad
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text('{"n": "test", "problem": "How many?", "answer": "1"}\n' * 2)
    (folder / "reward.py").write_text(REWARD)
    files = [f"environment.{split}_files=['{folder}/{split}.jsonl']" for split in ("train", "test")]
    own = [f"run_dir={folder}/run", f"reward={folder}/reward.py:score", "data.on_bad_row=skip", "max_steps=100"]
    own.append(f"environment.dev_files=['{folder}/test.jsonl']")
    return load_config([ROOT / "recipes" / "geo3k.yaml"], [*SMALL, *files, *own, *settings])


def trained_rows(folder: Path, config: Config) -> list[str]:
    """The rows of which completions were scored in training; each has two."""
    train(build(config))
    scored = (folder / "scored").read_text().split()
    (folder / "scored").unlink()
    return [row for row in scored if row != "test"]


def test_a_run_in_the_order_of_its_file(tmp_path: Path) -> None:
    in_order = ("max_epochs=2", "data.shuffle=false", "rollout.prompts_per_step=2")
    scored = trained_rows(tmp_path, counting_rows(tmp_path, *in_order))
    # the first score is a trial of the reward, on a row of its choice
    assert scored[1:] == [row for row in "0123401234" for _ in range(2)]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_every_row_is_trained_on_once_an_epoch_through_a_resume(tmp_path: Path) -> None:
    settings = ("max_epochs=2", "rollout.prompts_per_step=4", "checkpoint.every_steps=1")
    scored = trained_rows(tmp_path, counting_rows(tmp_path, *settings, "max_steps=2"))[1:]
    scored += trained_rows(tmp_path, counting_rows(tmp_path, *settings, "resume=auto"))[1:]
    assert Counter(scored) == dict.fromkeys("01234", 4)
    # the last step takes what is left of ten usable rows
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("num_rows", "per_step", "epochs", "steps"),
    [(36, 7, (1, 2), (6, 12)), (12, 32, (1, 2), (1, 2)), (40, 32, (1, 3), (2, 5))],
)
def test_more_epochs_on_resume_train_on_every_row_after_a_last_step_that_was_short(
    num_rows: int, per_step: int, epochs: tuple[int, int], steps: tuple[int, int], tmp_path: Path
) -> None:
    counted = Counter[str]()
    for max_epochs, num_steps in zip(epochs, steps, strict=True):
        settings = (f"max_epochs={max_epochs}", f"rollout.prompts_per_step={per_step}", "resume=auto")
        config = counting_rows(tmp_path, *settings, num_rows=num_rows, num_bad=0)
        planned = plan(config)
        counted.update(trained_rows(tmp_path, config)[2:])
        assert counted == {str(row): 2 * max_epochs for row in range(num_rows)}
        assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(1, num_steps + 1))
        assert any(f" {num_steps} steps of " in line for line in planned)


PUBLISHED = [
    *("model.path=null", "model.tiny={hidden_size: 32, num_layers: 1}", "model.dtype=float32"),
    *("max_steps=2", "log.progress=false", "log.tensorboard=false", "train.gradient_checkpointing=none"),
    *("rollout.prompts_per_step=4", "rollout.max_new_tokens=6", "data.max_prompt_tokens=512"),
    *("evaluate.before_training=false", "evaluate.test_size=2", "evaluate.dev_size=2", "parity.prompts=1"),
    *("evaluate.image_controls=false", "evaluate.shared_images=ignore", "algorithm.minibatches=2"),
    # untrained answers are never right; a reward that varies gives the update something to do
    HASH_REWARD,
]
UNBALANCED = ["rollout.samples_per_prompt=2", "train.enable_dynamic_batch_size=false", "train.groups_per_microbatch=2"]
GROUPS = ["rollout.samples_per_prompt=2"]


def geometry() -> list[dict[str, Any]]:
    return [row(f"How many sides have {n} squares?", str(4 * n)) for n in range(1, 13)]


def verl_geometry() -> list[dict[str, Any]]:
    prompts = [[{"role": "user", "content": f"<image>How many sides have {n} squares?"}] for n in range(1, 13)]
    shared = {"data_source": "hiyouga/geometry3k", "images": [square("red")]}
    truths = [{"style": "rule", "ground_truth": str(4 * n)} for n in range(1, 13)]
    return [shared | {"prompt": x, "reward_model": truth} for x, truth in zip(prompts, truths, strict=True)]


def pokemon_rows() -> list[dict[str, Any]]:
    """As verl's own script writes them, and the hub has them under `conversations`."""
    said = [("user", "<image>Describe it."), ("assistant", "A red square with a friendly face.")]
    messages = [{"role": role, "content": text} for role, text in said]
    return [{"messages": messages, "images": [square(colour, 32 + n)]} for n in range(4) for colour in COLOURS]


def photos() -> list[dict[str, Any]]:
    places = [("France", "Paris", 48.86, 2.35), ("Japan", "Tokyo", 35.68, 139.65)]
    rows = [dict(zip(("country", "city", "lat", "lon"), place, strict=True)) for place in places]
    return [row | {"image": square("green", 32 + n)} for n in range(6) for row in rows]


def visual_qa() -> list[dict[str, Any]]:
    questions = (("How many people?", "3", "counting"), ("What color is it?", "red", "attribute"))
    questions += (("Is there a dog?", "yes", "existence"),)
    rows = [dict(zip(("question", "answer", "type"), each, strict=True)) for each in questions]
    return [row | {"image": square("red", 32 + n)} for n in range(8) for row in rows]


RUNS = {
    "RLinf": ("geo3k", geometry, GROUPS),
    "verl": ("geo3k_qwen2_5_vl_7b", verl_geometry, GROUPS),
    "verl, frozen": ("geo3k_qwen2_5_vl_7b", geometry, [*GROUPS, "model.freeze_vision_tower=true"]),
    "verl, LoRA": ("geo3k_qwen2_5_vl_7b", geometry, [*GROUPS, "model.lora={rank: 64, alpha: 32, targets: all-linear}"]),
    "verl, unbalanced": ("geo3k_qwen2_5_vl_7b", geometry, UNBALANCED),
    "Qwen3.5": ("geo3k_qwen3_5", geometry, [*GROUPS, "model.tiny.family=qwen3_5", "model.tiny.num_layers=3"]),
    "pokemon": ("pokemon", pokemon_rows, GROUPS),
    "mixtrain, GeoSpot": ("vlm_gym_geospot", photos, ["reward=null", "curriculum.starts=[1, 2, 3, 4]"]),
    "mixtrain, visual QA": ("vlm_gym_vqa", visual_qa, ["curriculum.starts=[1, 2]"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "rows", "settings"), RUNS.values(), ids=RUNS.keys())
def test_it_takes_two_steps(
    recipe: str, rows: Callable[[], list[dict[str, Any]]], settings: Sequence[str], tmp_path: Path
) -> None:
    file, run_dir = tmp_path / "rows.parquet", tmp_path / "run"
    pq.write_table(pa.Table.from_pylist(rows()), file)
    files = [f"environment.{split}_files=['{file}']" for split in ("train", "dev", "test")]
    own = [f"run_dir={run_dir}", f"data.cache_dir={tmp_path / 'cache'}", *files]
    train(build(load_config([ROOT / "recipes" / f"{recipe}.yaml"], [*PUBLISHED, *own, *settings])))
    steps = read_metrics(run_dir)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["actions_trained"] > 0 and step["grad_norm"] > 0 for step in steps)
    if "vlm_gym" in recipe:
        assert all("value_loss" in step and step["epochs_run"] >= 1 for step in steps)
        assert [step["curriculum/stage"] for step in steps] == [1, 2]
    if recipe == "vlm_gym_vqa":
        assert "accuracy/train/counting" not in steps[0], "the first stage asks whether things exist"


def run_of(folder: Path, environment: Doors, **settings: object) -> Run:
    return build(Config.model_validate({**SETTINGS, "run_dir": str(folder), **settings}), environment)


@pytest.mark.parametrize("advantage", ["grpo", "reinforce++_baseline"])
def test_a_run_goes_on_with_the_episodes_that_are_left(advantage: str, tmp_path: Path) -> None:
    algorithm = {"advantage": advantage}
    train(run_of(tmp_path, Doors(failing=1, demonstrated=4), warmup=WARMUP, algorithm=algorithm))
    steps = read_metrics(tmp_path)
    assert [each["step"] for each in steps] == [1, 2]
    assert sum(each["episodes/failed_reply"] for each in steps) > 0
    reasons = [line["reason"] for line in lines_of(tmp_path / "unscored.jsonl")]
    demonstrated = [reason for reason in reasons if reason.startswith("a demonstration: train/")]
    # two steps of four rows are all eight rows
    assert len(demonstrated) == 4
    assert all("Doors.reply raised KeyError: 'no such door'" in reason for reason in reasons)
    console = (tmp_path / CONSOLE_FILE).read_text()
    assert "warm-up: 4 demonstrations failed and were left out; see unscored.jsonl" in console
    assert "sessions of the parity gate failed: train/" in console


@pytest.mark.parametrize("advantage", ["gae", "reinforce++"])
def test_the_only_episode_that_is_left_trains_where_none_are_compared(advantage: str, tmp_path: Path) -> None:
    train(run_of(tmp_path, Doors(failing=3), algorithm={"advantage": advantage}))
    left_out = [line["reason"] for line in lines_of(tmp_path / "unscored.jsonl")]
    assert not [reason for reason in left_out if reason.startswith("all but one")]


def test_a_run_whose_sessions_all_fail_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match=r"4 of 4 sessions of the parity gate failed: train/0: .*no such door"):
        wait_for(begin(run_of(tmp_path / "gate", Doors(failing=4))))
    with pytest.raises(TrainError, match=r"all 4 demonstrations of a warm-up step failed; the last error: a demonst"):
        wait_for(begin(run_of(tmp_path / "warm-up", Doors(failing=0, demonstrated=8), warmup=WARMUP)))


class OddReplies(Doors):
    """Sessions whose reply no prompt can hold."""

    def __init__(self, part: str | ImageRef) -> None:
        super().__init__(failing=0)
        self._reply = [Message(role="user", parts=(part,))]

    def open(self, task: Task, seed: int) -> Door:
        session = Door(opens=True)
        session.reply = lambda turns: self._reply  # type: ignore[method-assign]
        return session


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ("Go on.<|im_end|>", r"the environment's reply contains <\|im_end\|>"),
        (ImageRef(source=b"none", where="room 3"), "room 3: "),
    ],
)
def test_a_reply_that_no_prompt_holds_gets_no_advice_for_rows(part: str | ImageRef, why: str, tmp_path: Path) -> None:
    with pytest.raises(SessionError, match=why) as error:
        wait_for(begin(run_of(tmp_path, OddReplies(part))))
    assert "on_bad_row" not in str(error.value)
