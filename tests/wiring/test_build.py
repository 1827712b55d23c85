"""Settings reach what they are for."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from fovea.commands.exporting.export import export
from fovea.commands.targets import find_checkpoint, open_checkpoint
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.data.prompt_source import PromptedTask
from fovea.errors import TrainError
from fovea.loop import train
from fovea.models.processor import load_processor
from fovea.models.tiny import make_tiny
from fovea.run.context import Run
from fovea.run.lifecycle import begin
from fovea.train.base import ModelFacts
from fovea.train.packing import pack_row
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch, SampleGroup
from fovea.utils.installing import pip_install
from fovea.wiring import model as wired_model
from fovea.wiring.backends import open_backends, placement_of
from fovea.wiring.environment import make_environment
from fovea.wiring.model import MODEL_FOLDER, liger_kernels, locate_model, open_vlm, runs_liger, tokenizer_corpus
from fovea.wiring.outputs import model_table
from fovea_gym.environments.access import Access
from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.errors import ConfigError, DataError, MissingExtraError
from fovea_gym.rows.tasks import LazyTasks
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.settings.splits import EnvironmentSettings
from fovea_gym.types import Task
from fovea_gym.utils.event_loop import wait_for
from gym_tests.tables import table
from tests.records import sample_of
from tests.tiny_models import mixed_prompts, save, tiny, tower_passes
from tests.wiring.small import SMALL, run_of


@pytest.mark.parametrize(
    ("model", "cached"), [({}, False), ({"freeze_vision_tower": True}, True), ({"lora": {"rank": 2}}, True)]
)
def test_features_are_cached_where_the_tower_is_frozen(model: dict[str, object], cached: bool, tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"tiny": {}, **model}, **SMALL})
    environment = Shapes(config.environment, 0)  # type: ignore[arg-type]
    vlm = open_vlm(config, locate_model(config, tmp_path, lambda: environment), banned_ids=())
    encoded = tower_passes(vlm)
    images = mixed_prompts(tiny("qwen3_vl"))[0].images
    with torch.no_grad():
        assert torch.equal(*(vlm.image_features(images)[0].embeds_VD for _ in range(2)))
    assert len(encoded) == (1 if cached else 2)
    assert any(p.requires_grad for p in vlm.network.get_submodule("model.visual").parameters()) is not cached


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ({"cpu_offload": True}, "cpu_offload=true, but the model is on cpu, whose memory is the host's already; set"),
        ({"replicas": 2}, "replicas=2 does not divide the number of training processes, 1; set it to 1$"),
        ({"liger_kernels": True}, r"liger_kernels=true, but the model is on cpu .* CUDA only; set .*=false, or"),
    ],
)
def test_what_one_process_on_a_cpu_cannot_have(backend: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.backend\.{message}"):
        run_of(tmp_path, train={"backend": backend}, model={"tiny": {}, "device": "cpu"})


@table(
    ("setting", "device", "installed", "runs"),
    [
        ("auto", "cuda", True, True),
        ("auto", "cuda", False, False),
        ("auto", "cpu", True, False),
        (True, "cpu", False, True),
        (False, "cuda", True, False),
    ],
)
def test_liger_kernels_run_by_default_where_they_can(
    setting: bool | str, device: str, installed: bool, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {"liger_kernel": object()} if installed else {}
    monkeypatch.setattr(wired_model, "find_spec", packages.get)
    config = Config.model_validate({"model": {"tiny": {}}, "train": {"backend": {"liger_kernels": setting}}})
    assert runs_liger(config, torch.device(device)) is runs
    if setting == "auto" and device == "cuda":
        note = wired_model.liger_note(runs)
        assert note.startswith("slow: ") is not installed
        assert (pip_install("liger") in note) is not installed


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger_kernel is installed")
def test_liger_kernels_need_their_package() -> None:
    install = re.escape(pip_install("liger"))
    with pytest.raises(MissingExtraError, match=rf"liger_kernel is not installed; {install}, or set"):
        liger_kernels(torch.device("cuda"))


ANSWER = np.arange(5, 8)


def first_row(run: Run) -> PromptedTask:
    row = run.sources.train.get(0)
    assert row is not None
    return row


def one_sample(run: Run) -> Batch:
    """An answer to the first row."""
    return Batch(groups=(SampleGroup(prompt=first_row(run).prompt, samples=(sample_of(ANSWER),)),))


def test_pixel_limits_and_temperature_reach_their_places(tmp_path: Path) -> None:
    run = run_of(tmp_path, model={"tiny": {}, "max_pixels": 32 * 32}, rollout={"temperature": 0.7, "max_new_tokens": 3})
    row = first_row(run)
    assert row.prompt.images[0].tensors["image_grid_thw"].tolist() == [1, 4, 4]
    policy: TorchPolicy = run.policy.trained  # type: ignore[attr-defined, assignment]
    packed = pack_row(policy.vlm.family, [row.prompt], [[ANSWER]], policy.vlm.device)
    with torch.no_grad():
        expected, other = (policy.vlm(packed, temperature=t, chunk_tokens=9).logprobs_A for t in (0.7, 1.0))
    np.testing.assert_allclose(policy.logprobs(one_sample(run))[0], expected, atol=1e-6)
    assert not torch.allclose(expected, other, atol=1e-4)


def test_each_split_comes_from_its_own_rows(tmp_path: Path) -> None:
    sources = run_of(tmp_path).sources
    for name, size in (("train", 12), ("dev", 4), ("test", 8)):
        tasks = getattr(sources, name).tasks
        assert (len(tasks), tasks[0].id.partition("/")[0]) == (size, name)


@pytest.mark.parametrize(
    ("lora", "warmup", "kl", "copied"),
    [
        (None, None, {"coef": 0.1}, True),
        ({"rank": 2}, None, {"coef": 0.1}, False),
        ({"rank": 2}, {"max_steps": 1}, {"coef": 0.1}, True),
        (None, {"max_steps": 1}, None, False),
        ({"rank": 2}, {"max_steps": 1}, None, False),
    ],
)
def test_a_reference_is_copied_only_where_no_adapter_can_be_switched_off(
    lora: object, warmup: object, kl: object, copied: bool, tmp_path: Path
) -> None:
    """After a warm-up of the adapters the model without them is not what RL began with; no KL term needs none."""
    run = run_of(tmp_path, model={"tiny": {}, "lora": lora}, algorithm={"kl": kl}, warmup=warmup)
    assert (run.policy.trained.images_by_rank().reference is not None) is copied  # type: ignore[attr-defined]


def test_shared_images_stop_a_run_that_forbids_them_before_it_trains(tmp_path: Path) -> None:
    """The train rows stand in for the test rows."""
    run = run_of(tmp_path, evaluate={"shared_images": "forbid", "image_controls": False})
    object.__setattr__(run.sources, "test", run.sources.train)
    with run.metrics, pytest.raises(TrainError, match="12 test images are also in the training split"):
        wait_for(begin(run))
    assert not (tmp_path / "checkpoints").exists()


def test_kinds_and_trackers_are_looked_at_before_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing key of W&B should not cost the minutes that a large model takes to load."""
    opened = list[str]()

    def load(*_: object) -> None:
        raise ConfigError(f"opened before: {opened}")

    monkeypatch.setattr("fovea.wiring.run.make_trackers", lambda *_: opened.append("trackers") or [])
    monkeypatch.setattr("fovea.wiring.run.open_backends", load)
    with pytest.raises(ConfigError, match=r"opened before: .'trackers'"):
        run_of(tmp_path)
    with pytest.raises(ConfigError, match=r"no dev row is of kind existance.*the kinds are colour, counting, exis"):
        run_of(tmp_path, warmup={"stop_kind_accuracy": {"existance": 0.7}})


def test_bad_rows_are_skipped_when_the_words_are_learned() -> None:
    class HalfBad(Shapes):
        def tasks(self, split: Split) -> Sequence[Task]:
            def make(index: int) -> Task:
                if index % 2:
                    raise DataError("bad")
                return rows[index]

            rows = super().tasks(split)
            return LazyTasks(make, range(len(rows)), kind_of=lambda _: "all")

    environment = HalfBad(ShapesEnvironment(train_size=6), seed=0)
    assert len(tokenizer_corpus(environment, "skip")) == 2 * 3
    with pytest.raises(DataError):
        tokenizer_corpus(environment, "error")


def test_the_reference_is_a_copy_that_stays(tmp_path: Path) -> None:
    run = run_of(tmp_path, algorithm={"kl": {"coef": 0.1}})
    policy: TorchPolicy = run.policy.trained  # type: ignore[attr-defined, assignment]
    assert all(parameter.requires_grad for parameter in policy.vlm.parameters())
    batch = one_sample(run)
    before = policy.reference_logprobs(batch)
    with torch.no_grad():
        for parameter in policy.vlm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    for reference, first, trained in zip(policy.reference_logprobs(batch), before, policy.logprobs(batch), strict=True):
        np.testing.assert_array_equal(reference, first)
        assert not np.allclose(trained, first, atol=1e-2)


@pytest.mark.parametrize(("critic", "rate"), [({}, 0.02), ({"trunk": "separate"}, 0.02), ({"learning_rate": 0.5}, 0.5)])
def test_a_critics_rate_follows_the_policys_unless_set(critic: dict[str, object], rate: float, tmp_path: Path) -> None:
    """1e-5 beside 5e-7, at any scale (decision 009)."""
    train = {"learning_rate": 1e-3, "lr_warmup_steps": 0}
    run = run_of(tmp_path, algorithm={"name": "ppo", "advantage": {"critic": critic}}, train=train)
    metrics = wait_for(run.policy.update(Batch(groups=())))
    assert (metrics["learning_rate"], metrics["learning_rate/value"]) == pytest.approx((1e-3, rate))


def test_the_table_of_a_model_counts_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ModelFacts(device="cpu", device_name=None, parameters=())
    for num, said in ((1, "1 thread"), (2, "2 threads")):
        monkeypatch.setattr(torch, "get_num_threads", lambda num=num: num)
        assert str(model_table("tiny", facts).title) == f"tiny on cpu, {said}"


RUN = {
    "max_steps": 1,
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 3},
    "evaluate": {"image_controls": False, "shared_images": "ignore"},
    "parity": {"prompts": 0},
}


def settings(**model: object) -> Config:
    return Config.model_validate({"model": {"tiny": model}, "environment": {"name": "shapes", "train_size": 12}})


def shapes(config: Config) -> Environment:
    return Shapes(config.environment, config.seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_folder_is_the_model_bit_for_bit(family: str, tmp_path: Path) -> None:
    """As transformers loads it, against the network and tokenizer that were made."""
    config = settings(family=family)
    located = locate_model(config, tmp_path, lambda: shapes(config))
    assert (located.path, located.tiny) == (str(tmp_path / MODEL_FOLDER), None)
    assert config.model.tiny is not None
    made = make_tiny(config.model.tiny, tokenizer_corpus(shapes(config), "error"), config.seed)
    network = AutoModelForImageTextToText.from_pretrained(tmp_path / MODEL_FOLDER, dtype="float32")
    for (name, ours), (other, found) in zip(made.network.named_parameters(), network.named_parameters(), strict=True):
        assert (name, torch.equal(ours, found)) == (other, True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / MODEL_FOLDER)
    assert tokenizer.get_vocab() == made.processor.tokenizer.get_vocab()
    assert tokenizer.chat_template == made.processor.chat_template


def test_a_start_without_a_checkpoint_makes_the_model_of_its_own_settings(tmp_path: Path) -> None:
    """An earlier start with other settings may have failed before it took a step."""
    for width in (64, 32):
        config = settings(intermediate_size=width)
        locate_model(config, tmp_path, lambda config=config: shapes(config))
        network = AutoModelForImageTextToText.from_pretrained(tmp_path / MODEL_FOLDER)
        assert network.config.text_config.intermediate_size == width
    assert [path.name for path in tmp_path.iterdir()] == [MODEL_FOLDER], "nothing half-written is left beside it"


def test_resume_and_export_read_the_folder_or_make_that_of_an_old_run(tmp_path: Path) -> None:
    """A run folder from before models were kept in it gets the same model on first use."""
    run = tmp_path / "run"
    train(run_of(run, **RUN))
    kept = open_checkpoint(find_checkpoint(run)).vlm.state_dict()
    shutil.rmtree(run / MODEL_FOLDER)
    again = open_checkpoint(find_checkpoint(run)).vlm.state_dict()
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert (run / MODEL_FOLDER / "config.json").is_file()
    assert export(run, tmp_path / "exported").max_logprob_difference < 1e-4
    weights = run / MODEL_FOLDER / "model.safetensors"
    before = weights.stat().st_mtime_ns
    train(run_of(run, **RUN | {"max_steps": 2, "resume": "auto"}))
    assert weights.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("backend", "advice"),
    [("torch", r"cluster\.rollout_gpus=1"), ("megatron", r"rollout\.engine=vllm.*rollout\.engine\.python")],
)
def test_servers_want_one_leader(backend: str, advice: str) -> None:
    engine = {"name": "vllm_servers", "servers": ("http://127.0.0.1:8000",), "weights_dir": "weights"}
    given = {"model": {"path": "models/any"}, "rollout": {"engine": engine}, "train": {"backend": {"name": backend}}}
    config = Config.model_validate(given)
    with pytest.raises(ConfigError, match=rf"vllm_servers with 2 workers.*{advice}"):
        placement_of(config, 2)


@pytest.mark.parametrize(
    ("python", "there"),
    [("env/bin/python", "{here}/env/bin/python"), ("python", "python"), ("~/bin/py", "{home}/bin/py")],
)
def test_workers_on_ray_find_python(python: str, there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have another working directory; where the link to an interpreter leads is not an environment."""
    monkeypatch.chdir(tmp_path)
    Path("env/bin").mkdir(parents=True)
    Path("env/bin/python").symlink_to("/bin/sh")

    class Stopped(Exception):
        """Instead of a cluster."""

    def stop(_: Any, make: partial[Any], **__: Any) -> None:
        raise Stopped(make.args[0].config.rollout.engine.python)

    for name in ("use_token", "own_ray_on_loopback"):
        monkeypatch.setattr(f"fovea.wiring.backends.{name}", lambda: None)
    ray = SimpleNamespace(RayWorkers=stop)
    monkeypatch.setattr("fovea.wiring.backends.importlib", SimpleNamespace(import_module=lambda _: ray))
    model = {"path": str(save(tiny("qwen3_vl"), tmp_path / "model"))}
    rollout = {"engine": {"name": "vllm", "python": python}}
    config = Config.model_validate({"model": model, "rollout": rollout, "cluster": {"gpus_per_node": 1}})
    with pytest.raises(Stopped) as stopped:
        open_backends(config, config.model, load_processor(config.model))
    assert str(stopped.value) == there.format(here=os.getcwd(), home=Path.home())


class Returning(EnvironmentSettings):
    """Settings of another package, whose `make` returns this value."""

    name: Literal["part"] = "part"
    returned: Any = None

    def make(self, access: Access, seed: int) -> object:
        return self.returned


class WithoutSeed(Returning):
    def make(self, access: Access) -> object:  # type: ignore[override]
        return self.returned


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (WithoutSeed(), r"takes \(access: .*\) .*, but is called as make\(access, seed\); write def make\(self, acc"),
        (Returning(), "returned None, which is not an environment; return an environment"),
        (Returning(returned=7), "returned an object of type int, which is not an environment; return an env"),
        (Returning(returned=Path), "returned Path, which is not an environment; return an object of it"),
    ],
)
def test_a_make_that_gives_no_environment_is_refused(settings: EnvironmentSettings, message: str) -> None:
    config = load_config([], ["model.tiny={}"]).model_copy(update={"environment": settings})
    with pytest.raises(ConfigError, match=rf"\.make {message}"):
        make_environment(config)


def test_a_class_in_a_file_that_is_named_without_its_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clocks.py").touch()
    with pytest.raises(ConfigError, match=r"for your class in that file write clocks\.py:Clocks$"):
        load_config([], ["model.tiny={}", "environment=clocks:Clocks"])
    with pytest.raises(ConfigError, match=r"does not fit; allowed: .*(?<!Clocks)$"):
        load_config([], ["model.tiny={}", "environment=watches:Clocks"])
