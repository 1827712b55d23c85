"""Trackers by their real packages, offline: what is sent is read back from their files, over resumes and failures."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import re
import sqlite3
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from fovea.config.run import Config
from fovea.metrics.log import JsonlSink, MetricsLog
from fovea.metrics.tracker import TrackedSample, plain_name
from fovea.metrics.trackers import TrackedRun, TrackerSink
from fovea.utils.installing import pip_install
from fovea.wiring.outputs import chosen_trackers, make_trackers
from fovea_gym.errors import FoveaError, MissingExtraError
from gym_tests.tables import table

ROOT = Path(__file__).parents[2]
LOGS: Mapping[str, Mapping[str, object]] = {
    "tensorboard": {"tensorboard": True},
    "wandb": {"wandb_project": "demo"},
    "mlflow": {"mlflow_experiment": "demo"},
    "swanlab": {"swanlab_project": "demo"},
}
HOSTILE = "accuracy/dev/<b>../../what?\ud800\x1b[2J"
CAPTION = "![x](http://evil.example/a.png) <script>alert(1)</script>\n# \ud800 \x1b[2J \u202e end"
CLEAN_CAPTION = "![x](http://evil.example/a.png) <script>alert(1)</script>\n# ? \ufffd[2J \ufffd end"


@dataclass
class Seen:
    """What a tracker's files hold; images and captions by step."""

    ids: set[str] = field(default_factory=set)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    images: dict[int, list[np.ndarray[Any, Any]]] = field(default_factory=lambda: defaultdict(list))
    captions: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    settings: dict[str, object] = field(default_factory=dict)


def picture(shade: int) -> Image.Image:
    return Image.fromarray(np.arange(8 * 12 * 3, dtype=np.uint8).reshape(8, 12, 3) + np.uint8(shade))


SAMPLES = [TrackedSample(image=picture(shade), caption=CAPTION) for shade in (0, 9)]


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of MLflow with its tables, which take it seconds to make."""
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    client = pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{file}")
    client.search_experiments()
    return file


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "SWANLAB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)
    if "mlflow" in request.node.name:
        content = request.getfixturevalue("empty_database").read_bytes()
        (tmp_path / "mlflow.db").write_bytes(content)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")


def config_of(**log: object) -> Config:
    return Config.model_validate({"model": {"tiny": {}}, "log": {"tensorboard": False, **log}, "run_dir": "run"})


def log_steps(name: str, steps: Sequence[int], *, resume_step: int = 0, samples_at: int = 1) -> list[str]:
    """One attempt of a run, with every kind of thing that is sent; returns its warnings."""
    warnings = list[str]()
    folder = Path("run").resolve()
    jsonl = JsonlSink(folder, resume_step=resume_step)
    with MetricsLog([jsonl], make_trackers(config_of(**LOGS[name]), folder, resume_step, warnings.append)) as log:
        for step in steps:
            if step == samples_at:
                log.add_samples(SAMPLES)
            log.write(step, {"reward": step / 8, "loss": math.nan, "grad_norm": math.inf, HOSTILE: 1.0})
    return warnings


def read_tensorboard() -> Seen:
    events = EventAccumulator("run/tensorboard").Reload()
    texts = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    seen = Seen(ids={"one"}, names=set(events.Tags()["scalars"]))
    seen.rewards = [(event.step, event.value) for event in events.Scalars("reward")]
    for number in range(1, len(events.Tags()["images"]) + 1):
        for image in events.Images(f"samples/{number}"):
            seen.images[image.step].append(decoded(image.encoded_image_string))
        for text in texts[f"samples/{number}/text_summary"]:
            seen.captions[text.step].append(unindented(text.tensor_proto.string_val[0].decode()))
    (settings,) = texts["settings/text_summary"]
    seen.settings = json.loads(settings.tensor_proto.string_val[0].decode())
    return seen


def unindented(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.split("\n"))


def decoded(png: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def log_records(path: Path) -> Iterator[bytes]:
    """The records of an offline file of W&B: 7 bytes of header, then LevelDB's log format in blocks of 32 KiB."""
    content, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield record
            record = b""


def read_wandb() -> Seen:
    protocol = importlib.import_module("wandb.proto.wandb_internal_pb2")
    seen = Seen()
    for path in sorted(Path("run").glob("wandb/offline-run-*/*.wandb")):  # folders are named by time
        for content in log_records(path):
            record = protocol.Record.FromString(content)
            for entry in (*record.run.config.update, *record.config.update):
                seen.settings[entry.key] = json.loads(entry.value_json)
            history = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            values = {key: json.loads(value) for key, value in history.items()}
            if "reward" not in values:
                continue
            seen.ids.add(path.stem.removeprefix("run-"))
            seen.names.update(values)
            seen.rewards.append((int(values["step"]), values["reward"]))
            if files := values.get("samples/filenames"):
                images = [decoded((path.parent / "files" / file).read_bytes()) for file in files]
                seen.images[int(values["step"])] = images
                seen.captions[int(values["step"])] = values["samples/captions"]
    return seen


def read_mlflow() -> Seen:
    client = importlib.import_module("mlflow").MlflowClient()
    experiment = client.get_experiment_by_name("demo")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    seen = Seen(ids={run.info.run_id}, names=set(run.data.metrics), settings={"seed": int(run.data.params["seed"])})
    seen.rewards = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "reward")]
    for folder in client.list_artifacts(run.info.run_id, "samples"):
        step = int(folder.path.removeprefix("samples/step-"))
        for file in client.list_artifacts(run.info.run_id, folder.path):
            content = Path(client.download_artifacts(run.info.run_id, file.path)).read_bytes()
            if file.path.endswith(".png"):
                seen.images[step].append(decoded(content))
            else:
                seen.captions[step].append(content.decode())
    return seen


def read_swanlab() -> Seen:
    store = importlib.import_module("swanlab.sdk.internal.core_python.store")
    protocol = importlib.import_module("swanlab.proto.swanlab.record.v1.record_pb2")
    seen = Seen()
    for path in sorted(Path("run/swanlog").glob("run-*/*.swanlab")):
        reader = store.DataStoreReader()
        reader.open(path)
        while (content := reader.scan()) is not None:
            record = protocol.Record.FromString(content)
            if record.HasField("start"):
                seen.ids.add(record.start.id)
            elif record.HasField("scalar") and not record.scalar.key.startswith("__"):
                seen.names.add(record.scalar.key)
                if record.scalar.key == "reward":
                    seen.rewards.append((record.scalar.step, record.scalar.value.number))
            elif record.HasField("media"):
                for item in record.media.value.items:
                    picture = path.parent / "media/image" / item.filename
                    seen.images[record.media.step].append(decoded(picture.read_bytes()))
                    seen.captions[record.media.step].append(item.caption)
        if (config := path.parent / "files/config.yaml").exists():
            seen.settings |= {key: entry["value"] for key, entry in yaml.safe_load(config.read_text()).items()}
    return seen


READ = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "swanlab": read_swanlab}


@pytest.mark.parametrize("name", LOGS)
def test_a_resumed_run_goes_on_in_the_tracker_with_each_step_once(name: str) -> None:
    assert log_steps(name, [1, 2]) == []
    if name in ("wandb", "swanlab"):
        time.sleep(1.01 - time.time() % 1)  # they name an offline folder by the second: two in one would share it
    assert log_steps(name, [2, 3], resume_step=1, samples_at=3) == []
    seen = READ[name]()
    deadline = time.monotonic() + 60  # W&B's service is a separate process and may still be writing
    while len(seen.rewards) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
        seen = READ[name]()
    assert len(seen.ids) == 1
    assert seen.rewards == [(step, step / 8) for step in (1, 2, 3)]
    assert sorted(seen.images) == sorted(seen.captions) == [1, 3]
    for step in (1, 3):
        assert len(seen.images[step]) == 2
        for image, sample in zip(seen.images[step], SAMPLES, strict=True):
            np.testing.assert_array_equal(image, np.asarray(sample.image))
        assert seen.captions[step] == [CLEAN_CAPTION] * 2
    assert seen.settings["seed"] == 0
    (hostile,) = (key for key in seen.names if key.startswith("accuracy"))
    assert "\x1b" not in hostile
    hostile.encode()
    if name in ("mlflow", "swanlab"):
        assert not {"loss", "grad_norm"} & seen.names, "what is not finite is left out"


def test_text_of_a_model_is_shown_by_tensorboard_as_it_is() -> None:
    log_steps("tensorboard", [1])
    events = EventAccumulator("run/tensorboard").Reload()
    shown = markdown_to_safe_html(events.Tensors("samples/1/text_summary")[0].tensor_proto.string_val[0])
    assert "<img" not in shown
    assert "<h1" not in shown
    assert "![x](http://evil.example/a.png)" in shown


def rename_table(old: str, new: str) -> None:
    with sqlite3.connect("mlflow.db") as database:
        database.execute(f"ALTER TABLE {old} RENAME TO {new}")


def test_an_mlflow_that_fails_is_warned_of_once_and_gets_the_steps_when_it_works_again() -> None:
    now, warnings, folder = [0.0], list[str](), Path("run").resolve()
    (chosen,) = chosen_trackers(config_of(**LOGS["mlflow"]).log)
    run = TrackedRun(folder / "mlflow_run.json", goes_on=False)
    given: Any = {"settings": {"seed": 0}, "warn": warnings.append, "clock": lambda: now[0]}
    sink = TrackerSink(folder, chosen.setting, run, partial(chosen.connect, folder, run), **given)
    with MetricsLog([JsonlSink(folder)], [sink]) as log:
        log.write(1, {"reward": 1 / 8})
        rename_table("metrics", "gone")
        for step in (2, 3):
            log.write(step, {"reward": step / 8})
        assert len(warnings) == 1
        assert warnings[0].startswith("log.mlflow_experiment=demo: failed after step 1 (")
        rename_table("gone", "metrics")
        log.write(4, {"reward": 4 / 8})  # within the pause
        assert run.last_step == 1
        now[0] += 60
        log.write(5, {"reward": 5 / 8})
        assert warnings[1:] == ["log.mlflow_experiment=demo: works again, and has the metrics of all steps"]
    assert read_mlflow().rewards == [(step, step / 8) for step in range(1, 6)]


def test_a_server_that_is_gone_ends_a_new_run_at_once_and_no_resumed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(FoveaError, match=r"^log\.mlflow_experiment=demo: "):
        log_steps("mlflow", [1])
    JsonlSink(Path("run").resolve()).write(1, {"reward": 0.0})
    (warning,) = log_steps("mlflow", [2], resume_step=1)
    assert "the run continues" in warning


def test_an_mlflow_without_the_run_that_goes_on_says_so(empty_database: Path) -> None:
    log_steps("mlflow", [1])
    Path("mlflow.db").write_bytes(empty_database.read_bytes())
    stores = importlib.import_module("mlflow.tracking._tracking_service.utils")._tracking_store_registry
    stores._get_store_with_resolved_uri.cache_clear()
    (warning,) = log_steps("mlflow", [2], resume_step=1)
    assert "set MLFLOW_TRACKING_URI as before, or delete mlflow_run.json" in warning


def test_a_tracker_that_is_added_to_a_run_gets_all_of_its_steps() -> None:
    folder = Path("run")
    with MetricsLog([JsonlSink(folder)]) as log:
        for step in (1, 2):
            log.write(step, {"reward": 0.0})
    added, run = Mock(), TrackedRun(folder / "numbers_run.json", goes_on=True)
    sink = TrackerSink(folder, "numbers", run, lambda: added, settings={}, warn=print)
    with MetricsLog([JsonlSink(folder, resume_step=2)], [sink]) as log:
        log.write(3, {"reward": 0.0})
    added.begin.assert_called_once()
    assert [each.args[0] for each in added.write.mock_calls] == [1, 2, 3]


def test_a_tracker_that_takes_its_time_to_fail_is_tried_less_often() -> None:
    now, attempts = [0.0], list[float]()

    def connect() -> NoReturn:
        attempts.append(now[0])
        now[0] += 30
        raise TimeoutError("no answer")

    run, given = TrackedRun(None, goes_on=False), {"settings": {}, "warn": print, "clock": lambda: now[0]}
    sink = TrackerSink(Path("run"), "slow", run, connect, **given)
    for step in range(1, 61):
        sink.write(step, {"reward": 0.0})
        now[0] += 10
    assert attempts == [0, 330]


def test_a_run_that_goes_back_to_a_named_checkpoint_has_a_curve_of_its_own() -> None:
    file = Path("numbers_run.json")
    first = TrackedRun(file, goes_on=False)
    first.has(7)
    assert (TrackedRun(file, goes_on=True).id, TrackedRun(file, goes_on=True).last_step) == (first.id, 7)
    assert TrackedRun(file, goes_on=False).id != first.id
    assert TrackedRun(file, goes_on=False).last_step == 0


CHANGED_NAMES = {"a/what?": "a/what__", "a/../../b": "b_", "../x": "x_", "///": "__", ".hidden/": "hidden_"}
CHANGED_NAMES["x" * 300] = "x" * 240 + "_"
KEPT_NAMES = {name: name for name in ("accuracy/dev/count", "response tokens 1.5", "farbe/grün")}


@table(("name", "plain"), (KEPT_NAMES | CHANGED_NAMES).items())
def test_names_that_trackers_refuse_are_replaced_and_stay_apart(name: str, plain: str) -> None:
    made = plain_name(name)
    assert made == plain if plain == name else (made.startswith(plain) and len(made) == len(plain) + 6)
    assert plain_name("a/b?") != plain_name("a/b!")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_without_its_package_a_tracker_names_the_install_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"fovea.metrics.{name}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"\b{name} .*{re.escape(pip_install(name))}"):
        chosen_trackers(config_of(**LOGS[name]).log)
    monkeypatch.undo()
    sys.modules.pop(f"fovea.metrics.{name}", None)


KEYLESS = """
from pathlib import Path
from fovea.wiring.outputs import make_trackers
from fovea.config.run import Config
from fovea_gym.errors import ConfigError

for name in ("wandb", "swanlab"):
    log = {"tensorboard": False, f"{name}_project": "demo"}
    try:
        make_trackers(Config.model_validate({"model": {"tiny": {}}, "log": log}), Path("run").resolve(), 0, print)
    except ConfigError as error:
        print("one line:", error)
"""


def test_without_a_key_the_fix_is_one_line(tmp_path: Path) -> None:
    for package in ("wandb", "swanlab"):
        pytest.importorskip(package)
    Path("run").mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "SWANLAB"))}
    done = subprocess.run(
        [sys.executable, "-c", KEYLESS],
        env={**environment, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},  # without the keys of whoever runs this
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("one line: ")]
    for name, line in zip(("wandb", "swanlab"), lines, strict=True):
        assert re.match(rf"one line: log\.{name}_project=demo: .*{name.upper()}_MODE=offline", line)


def test_a_database_of_mlflow_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("fovea.metrics.mlflow")

    def fail() -> None:
        raise module.MlflowException("Model registry functionality is unavailable; got unsupported URI 'sqlite:'")

    monkeypatch.setattr(module, "MlflowClient", fail)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(MissingExtraError, match=rf"sqlalchemy, .*; {re.escape(pip_install('mlflow'))}"):
        log_steps("mlflow", [1])
