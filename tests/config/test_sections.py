"""What sections refuse, what engines, trainers, clusters and mixtures cannot do, and what is derived from others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from fovea.cluster.placement import Placement
from fovea.config.algorithm import Algorithm, KlInLoss, KlInReward
from fovea.config.backends import EmbeddedSettings, MegatronBackend, SglangSettings, VllmServersSettings, VllmSettings
from fovea.config.describe import describe
from fovea.config.loading import dump_config, keys_of, load_config
from fovea.config.model import Lora, Model, TinyModel
from fovea.config.run import Config
from fovea.config.sections import Cluster, Rollout, Train
from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import Section, Tree
from fovea_gym.settings.environments import Geo3kEnvironment, MixtureEnvironment, OwnEnvironment, ShapesEnvironment
from gym_tests.tables import table

APART = {"placement": "disaggregated", "rollout_gpus": 1}
MIXED = {"name": "mixture", "parts": {"a": {"environment": {"name": "shapes"}}}}
JUDGE = {"url": "http://x/v1", "model": "m"}


def test_the_smallest_config_is_the_demo_model_on_shapes_and_frozen() -> None:
    config = Config(model=Model(tiny=TinyModel()))
    assert (config.environment, config.warmup, config.train.learning_rate) == (ShapesEnvironment(), None, 1e-6)
    with pytest.raises(ValidationError, match="frozen"):
        config.rollout.top_p = 0.5  # type: ignore[misc]
    # the vision tower trains unless frozen or behind adapters
    assert Model(path="folder").trains_vision
    assert not Model(path="folder", freeze_vision_tower=True).trains_vision
    assert not Model(path="folder", lora=Lora()).trains_vision


@table(
    ("section", "values", "message"),
    [
        (Rollout, {"samples_per_prompt": 0}, "should be greater than or equal to 1"),
        (Rollout, {"temperature": 0}, "should be greater than or equal to 0.000001"),
        (Rollout, {"top_p": 0}, "should be greater than 0"),
        (Rollout, {"min_p": 1.1}, "should be less than or equal to 1"),
        (Train, {"betas": (0.9, 1.0)}, "should be less than 1"),
        (Train, {"learning_rate": 0}, "should be greater than 0"),
        (ShapesEnvironment, {"level": 4}, "should be less than or equal to 3"),
        (ShapesEnvironment, {"text_share": 1.1}, "should be less than or equal to 1"),
        (Geo3kEnvironment, {"test_files": ["a"]}, r"train_files\n  Field required"),
        (TinyModel, {"vocabulary_size": 299}, "should be greater than or equal to 300"),
        (TinyModel, {"image_side_px": 15}, "should be greater than or equal to 16"),
        (TinyModel, {"num_heads": 3}, r"hidden_size=64 is not a multiple of 8 \* num_heads=24; .*=72"),
        (TinyModel, {"num_kv_heads": 3}, "num_heads=2 is not a multiple of num_kv_heads=3"),
        (TinyModel, {"family": "qwen3_vl_moe", "intermediate_size": 32}, "=32 are square.*set intermediate_size=40"),
        (Rollout, {"samples_per_prompt": 10**12}, "should be less than or equal to 131072"),
        (Rollout, {"prompts_per_step": 10**9}, "should be less than or equal to 131072"),
        (
            Rollout,
            {"prompts_per_step": 10**5, "samples_per_prompt": 100},
            "are 10,000,000 completions a step, more than",
        ),
        (Rollout, {"max_new_tokens": 10**12}, "should be less than or equal to 1048576"),
        (Lora, {"rank": 10**5}, "should be less than or equal to 8192"),
        (Train, {"adam_eps": 1e-300}, r"should be greater than or equal to 0\.0{29}1"),
        (Train, {"weight_decay": 1e9}, "should be less than or equal to 1000"),
        (Train, {"learning_rate": 1e9}, "should be less than or equal to 100"),
        (Train, {"max_grad_norm": 1e-300}, "should be greater than or equal to 0.000000000001"),
        (KlInLoss, {"coef": 1e300}, "should be less than or equal to 1000000"),
        (KlInReward, {"coef": 1e300}, "should be less than or equal to 1000000"),
        (Algorithm, {"entropy_coef": 1e300}, "should be less than or equal to 1000000"),
        (Config, {"model": {"tiny": {}}, "threads": 10**5}, "should be less than or equal to 1024"),
        (Config, {"model": {"tiny": {}}, "reward_timeout_seconds": 1e300}, "should be less than or equal to 100000000"),
        (TinyModel, {"hidden_size": 2**40}, "should be less than or equal to 16384"),
        (ShapesEnvironment, {"train_size": 10**12}, "should be less than or equal to 16777216"),
        (Model, {}, r"set exactly one of model\.path"),
        (Model, {"path": "folder", "tiny": {}}, r"set exactly one of model\.path"),
        (Model, {"path": "folder", "min_pixels": 2, "max_pixels": 1}, "min_pixels=2 is above max_pixels=1"),
    ],
)
def test_what_a_section_refuses(section: type[Section], values: Tree, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        section.model_validate(values)


def of_tiny(**settings: object) -> Config:
    return Config.model_validate({"model": {"tiny": {}}, **settings})


@table(
    ("settings", "message"),
    [
        (
            {"rollout": {"max_staleness_steps": 1}, "cluster": APART, "algorithm": {"old_logprobs": "trainer"}},
            r"max_staleness_steps=1 .*old_logprobs=trainer .* set it to engine, or",
        ),
        (
            {"algorithm": {"old_logprobs": "engine", "importance_sampling_fix": True}},
            "old_logprobs=engine makes equal;",
        ),
        ({"rollout": {"max_staleness_steps": 2}}, r"_steps=2 .*set cluster\.placement=disaggregated"),
        (
            {"rollout": {"max_staleness_steps": 2}, "cluster": {**APART, "placement": "hybrid"}},
            r"_steps=2 .*set cluster\.placement=disaggregated",
        ),
        ({"rollout": {"engine": {"decode_weights": "int8"}}}, r"set algorithm.importance_sampling_fix=true, or"),
        # and nothing else that follows from these
        ({"environment": MIXED, "second_opinion": "wrong", "judge": JUDGE}, "second_opinion overrules the rule of one"),
        ({"reward": [], "reward_weights": [1.0]}, re.escape("reward=[] names no function")),
    ],
)
def test_what_a_run_refuses_in_one_complaint(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        of_tiny(**settings)
    assert "; also: " not in str(caught.value)


def test_what_corrects_for_other_probabilities_is_allowed() -> None:
    stale = {"rollout": {"max_staleness_steps": 1}, "cluster": APART}
    assert of_tiny().algorithm.old_logprobs == "trainer"
    assert of_tiny(**stale, algorithm={"name": "ppo"}).algorithm.old_logprobs == "engine"
    weighed = {"importance_sampling_fix": True}
    assert of_tiny(**stale, algorithm=weighed).algorithm.old_logprobs == "trainer"
    of_tiny(rollout={"engine": {"decode_weights": "int8"}}, algorithm=weighed)


SERVERS = (
    *("rollout.engine=vllm_servers", "rollout.engine.weights_dir=w"),
    "rollout.engine.servers=[http://a:1, http://b:2]",
)
VLLM, SGLANG = ("rollout.engine=vllm",), ("rollout.engine=sglang",)
MEGATRON = ("train.backend.name=megatron",)
ENGINE, FIX = "rollout.engine", "algorithm.importance_sampling_fix=true"


def load(*words: str) -> Config:
    return load_config([], ["model.tiny.hidden_size=64", "environment=shapes", *words])


def test_names_choose_the_engine_and_the_backend() -> None:
    assert isinstance(load().rollout.engine, EmbeddedSettings)
    vllm = load(*VLLM, "rollout.engine.kv_cache_gib=2", "rollout.engine.limit_mm_per_prompt.image=3").rollout.engine
    assert isinstance(vllm, VllmSettings)
    assert vllm.limit_mm_per_prompt.image == 3
    assert load(*VLLM, "rollout.engine.min_new_tokens=4", FIX).rollout.engine.name == "vllm"
    sampling = ("rollout.top_p=0.9", "rollout.top_k=20", "rollout.temperature=3")
    sglang = load(*SGLANG, "rollout.engine.max_total_tokens=5000", *sampling).rollout.engine
    assert isinstance(sglang, SglangSettings)
    assert sglang.max_total_tokens == 5000
    assert isinstance(load(*SERVERS).rollout.engine, VllmServersSettings)
    sizes = ("train.backend.tensor_parallel_size=2", "train.backend.sequence_parallel=true")
    backend = MegatronBackend(tensor_parallel_size=2, sequence_parallel=True, pipeline_parallel_size=1)
    assert load(*MEGATRON, *sizes).train.backend == backend


@table(
    ("base", "words", "message"),
    [
        (VLLM, "rollout.top_p=0.9", r"rollout\.top_p=0\.9 with rollout\.engine=vllm.*set rollout\.top_p=1, or"),
        (VLLM, "rollout.top_k=20", r"rollout\.top_k=20 with rollout\.engine=vllm.*set rollout\.top_k=0, or"),
        (VLLM, "rollout.min_p=0.1", r"rollout\.min_p=0\.1 with rollout\.engine=vllm"),
        (VLLM, "rollout.temperature=3", r"temperature=3 with rollout\.engine=vllm.*between 0\.01 and 2"),
        (VLLM, f"{ENGINE}.max_model_len=100", r"=100 is less than data\.max_prompt_tokens=2048.*to 2560"),
        (VLLM, f"{ENGINE}.min_new_tokens=4", r"min_new_tokens=4 samples.*importance_sampling_fix=true, or"),
        (VLLM, f"{ENGINE}.min_new_tokens=600 {FIX}", r"_tokens=600 is more than rollout\.max_new_tokens=512"),
        (
            VLLM,
            f"{ENGINE}.min_new_tokens=4 rollout.stop_after_answer=true",
            r"stop_after_answer=true .*min_new_tokens=0",
        ),
        (VLLM, f"{ENGINE}.repetition_penalty=1.1", r"repetition_penalty is not a setting here: .*; remove it"),
        (VLLM, f"{ENGINE}.data_parallel_size=2", r"is not a setting here: every worker has a separate engine"),
        (VLLM, f"{ENGINE}.decode_weights=int8", r"decode_weights: a setting of .*\.name=embedded only"),
        (VLLM, f"{ENGINE}.gpu_memory_utilisation=0.4", r"did you mean rollout\.engine\.gpu_memory_utilization"),
        (SERVERS, f"{ENGINE}.gpu_memory_utilization=0.5", "gpu_memory_utilization"),
        (SERVERS, "rollout.top_p=0.9", "rollout.top_p=0.9 with rollout.engine=vllm_servers, whose log-probs"),
        (SERVERS, "rollout.temperature=5", "which samples between 0.01 and 2"),
        (SERVERS, f"{ENGINE}.servers=[http://a:1,http://a:1]", "lists http://a:1 twice"),
        (SERVERS, f"{ENGINE}.servers=[]", "rollout.engine.servers"),
        (SERVERS, f"{ENGINE}.servers=[http://me:secret@a:1]", "rollout.engine.servers"),
        (SGLANG, "rollout.min_p=0.1", r"rollout\.min_p=0\.1 with rollout\.engine=sglang.*set rollout\.min_p=0, or"),
        (SGLANG, f"{ENGINE}.min_new_tokens=4", r"min_new_tokens=4 samples.*importance_sampling_fix=true, or"),
        (SGLANG, f"{ENGINE}.kv_cache_gib=1", r"kv_cache_gib: a setting of rollout\.engine\.name=vllm only"),
        (MEGATRON, "model.lora.dropout=0.1", r"dropout with train\.backend=megatron: copies of a prompt would get"),
        (MEGATRON, "model.lora.rank=3 train.backend.tensor_parallel_size=2", r"model\.lora\.rank=3 .* a multiple of 2"),
        (
            MEGATRON,
            "algorithm.name=ppo algorithm.advantage.critic.trunk=separate",
            r"critic\.trunk=separate with .*head",
        ),
        (MEGATRON, "cluster.placement=disaggregated cluster.rollout_gpus=1", r"disaggregated with .*process groups"),
        (MEGATRON, "cluster.placement=hybrid cluster.rollout_gpus=1", "placement=hybrid with .*process groups"),
        (MEGATRON, "train.gradient_checkpointing=selective", r"=selective with .*\(full\) or none"),
        (MEGATRON, "model.lora.parts=vision_tower", r"lora\.parts with "),
        (MEGATRON, "train.projector_learning_rate=1e-5", r"projector_learning_rate with "),
        (MEGATRON, "train.backend.replicas=2", r"train\.backend\.replicas: .*\.name=torch\b"),
        (MEGATRON, "train.backend.sequence_parallel=true", r"sequence_parallel=true with .*tensor_parallel_size=1"),
        ((), "cluster.num_nodes=2", r"cluster\.num_nodes=2\b.*\bRay\b"),
        ((), "cluster.rollout_gpus=1", r"cluster\.rollout_gpus=1\b"),
        ((), "cluster.placement=disaggregated", r"placement=disaggregated\b"),
        ((), "cluster.placement=hybrid", r"cluster\.placement=hybrid\b"),
        (("cluster={placement: hybrid, rollout_gpus: 4, num_nodes: 2, gpus_per_node: 2}",), "", r"rollout_gpus=4\b"),
    ],
)
def test_what_cannot_be_done_is_refused(base: tuple[str, ...], words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*base, *words.split())


def test_the_last_workers_hold_an_engine_only_and_learners_are_divided_by_replicas() -> None:
    workers = [0, 1, 2, 3]
    alone = {"rollout_gpus": 1}
    clusters = (Cluster(), Cluster(placement="disaggregated", **alone), Cluster(placement="hybrid", **alone))
    placements = [Placement.of(cluster, len(workers)) for cluster in clusters]
    held = [(placement.learners(workers), placement.engines(workers)) for placement in placements]
    assert held == [(workers, workers), ([0, 1, 2], [3]), ([0, 1, 2], workers)]
    cluster = Cluster(placement="disaggregated", rollout_gpus=2)
    assert Placement.of(cluster, 8, replicas=3).replicas == 3
    with pytest.raises(ConfigError, match=r"replicas=4\b.*\b1, 2, 3 or 6$"):
        Placement.of(cluster, 8, replicas=4)
    with pytest.raises(ConfigError, match="there are 1 processes in all, so none would train"):
        Placement.of(Cluster(placement="disaggregated", rollout_gpus=1), 1)


RECIPE = """
model: {tiny: {}}
environment:
  name: mixture
  parts:
    geometry: {share: 3, environment: {name: geo3k, train_files: [a], test_files: [b]}}
    scenes: {}
"""
GEOMETRY, SCENES = "environment.parts.geometry", "environment.parts.scenes"


def load_parts(folder: Path, *overrides: str) -> Config:
    (folder / "mixed.yaml").write_text(RECIPE)
    return load_config([folder / "mixed.yaml"], overrides)


def test_parts_have_the_settings_of_any_environment(tmp_path: Path) -> None:
    config = load_parts(tmp_path, f"{GEOMETRY}.environment.think_tags=true", f"{SCENES}.share=0.5")
    assert isinstance(config.environment, MixtureEnvironment)
    shares = {name: part.share for name, part in config.environment.parts.by_name.items()}
    assert shares == {"geometry": 3, "scenes": 0.5}
    assert config.environments == {
        f"{GEOMETRY}.environment": Geo3kEnvironment(train_files=("a",), test_files=("b",), think_tags=True),
        f"{SCENES}.environment": ShapesEnvironment(),
    }
    (tmp_path / "all.yaml").write_text(dump_config(config))
    assert load_config([tmp_path / "all.yaml"], []) == config


def test_an_override_may_add_a_part_and_parts_have_short_forms(tmp_path: Path) -> None:
    for override in (".environment=shapes", "={environment: {name: shapes}}"):
        added = load_parts(tmp_path, f"environment.parts.more{override}", "environment.parts.more.share=4").environment
        assert isinstance(added, MixtureEnvironment)
        assert added.parts.by_name["more"].share == 4
    # the choice of an environment comes before its settings, wherever it is written
    files = [f"{SCENES}.environment.{split}_files=[x]" for split in ("train", "test")]
    config = load_parts(tmp_path, *files, f"{SCENES}.environment=vqa", f"{GEOMETRY}.environment=mine.py:Class")
    geometry, scenes = config.environments.values()
    assert geometry == OwnEnvironment(file="mine.py:Class")
    assert scenes.name == "vqa"
    assert load_config([], ["model.tiny={}", f"{SCENES}.share=2", "environment=mixture"]).environments == {
        f"{SCENES}.environment": ShapesEnvironment()
    }


@table(
    ("override", "message"),
    [
        (f"{GEOMETRY}.shar=2", r"geometry\.shar: no such setting; did you mean environment\.parts\.PART\.share\?"),
        (f"{GEOMETRY}.environment.train_filez=[a]", r"train_filez: no such .* mean environment\.train_files\?"),
        (f"{GEOMETRY}.environment.image_side_px=48", r"geometry: environment\.image_side_px: a setting of .*=shapes"),
        (f"{SCENES}.environment.image_side_px=x", r'scenes\.environment\.image_side_px: "x" .*allowed: integer >= 32'),
        (f"{SCENES}.environment=vqa", r"scenes\.environment\.train_files: must be set; allowed: list of text"),
        (f"{SCENES}.environment=mixture", r'environment\.name: "mixture" does not fit; allowed: shapes \|'),
        (f"{SCENES}.environment={{level: [1, 1]}}", r"environment\.parts\.scenes: environment\.level=\[1, 1\] names"),
        ("environment.parts.scene.share=2", r"scene: no such part; .*\.name would add one; did you mean .*\.scenes\?"),
        ("environment.parts.other.environment.level=2", r"other: no such part; .*\.environment\.name would add one"),
        (f"{GEOMETRY}.share=0", r"geometry\.share: 0 does not fit; allowed: number > 0"),
        ("environment.parts={a/b: {}}", r"'a/b' cannot be part of the names"),
        ("environment.parts=null", r"environment\.parts: null does not fit"),
        ("max_epochs=2", r"max_epochs=2 uses every row once per epoch, but environment\.name=mixture samples"),
        ("data.shuffle=false", r"data\.shuffle=false uses every row once per epoch, but environment\.name=mixture"),
        ("second_opinion=wrong", r"second_opinion overrules .*; set second_opinion="),
        ("evaluate.every_steps=5", r"geometry\.environment\.dev_share=0 leaves no dev rows"),
    ],
)
def test_what_a_mixture_cannot_have(override: str, message: str, tmp_path: Path) -> None:
    no_dev = [f"{GEOMETRY}.environment.dev_share=0"] if "every_steps" in override else []
    with pytest.raises(ConfigError, match=message) as told:
        load_parts(tmp_path, override, *no_dev)
    assert "\n" not in str(told.value)


def test_a_reward_that_would_never_be_asked_and_parts_without_a_mixture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\benvironment\.parts\.geometry\.reward\b"):
        load_parts(tmp_path, "reward=a.py:f", f"{GEOMETRY}.reward=b.py:g")
    assert load_parts(tmp_path, f"{GEOMETRY}.reward=b.py:g").rewards == {f"{GEOMETRY}.reward": ("b.py:g",)}
    for words, told in (
        ([f"{GEOMETRY}.environment.train_files=[a]"], "parts: a setting of environment.name=mixture only"),
        (["environment=mixture", "environment.parts={}"], "parts is empty"),
    ):
        with pytest.raises(ConfigError, match=rf"environment\.{told}"):
            load_config([], ["model.tiny={}", *words])


def test_overrides_that_name_code_in_a_part() -> None:
    named = keys_of([f"{GEOMETRY}.environment=a.py:C", "environment.parts={b: {environment: b.py:D, reward: c.py:f}}"])
    of_b = {"environment.parts.b.environment.file", "environment.parts.b.reward"}
    assert {f"{GEOMETRY}.environment.file", *of_b} < named
    assert keys_of([f"{GEOMETRY}.share=2"]) == {f"{GEOMETRY}.share"}
    # an alias, and the name of a section, that several members of a union may have
    assert keys_of(["algorithm.loss.clip_epsilon=1"]) == {"algorithm.loss.clip_low", "algorithm.loss.clip_high"}
    assert keys_of([f"{GEOMETRY}.environment=vqa"]) == {f"{GEOMETRY}.environment.name"}
    own = {"environment.name", "environment.file", "reward", "seed"}
    assert keys_of(["environment=a.py:C", "reward=b.py:f", "seed=1"]) == own
    assert "environment.file" not in keys_of(["environment.name=own", "environment.settings.x=1"])


def test_descriptions_of_parts() -> None:
    parts = describe("environment.parts")
    keys = [each.key.removeprefix("environment.parts.PART.") for each in parts]
    assert keys == ["share", "environment", "reward"]
    assert describe(f"{GEOMETRY}.share") == parts[:1]
    assert describe(f"{GEOMETRY}.environment.train_files") == describe("environment.train_files")
