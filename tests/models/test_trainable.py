"""What is trained: LoRA by peft, its folders as the start, frozen parts, and their gradients."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from fovea.commands.targets import CheckpointTarget, ModelTarget, OpenedModel, open_checkpoint, open_model, parse_target
from fovea.config.loading import dump_config
from fovea.config.model import Lora, Model, TinyModel
from fovea.config.run import Config
from fovea.errors import ModelError
from fovea.models.adapter_files import ADAPTER_WEIGHTS
from fovea.models.modules import projector_modules
from fovea.models.plain import PlainVLM
from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.tiny import TinyParts
from fovea.models.trainable import (
    ADAPTER,
    adapters_off,
    choose_trainable,
    count_parameters,
    factored_weights,
    lora_layers,
    merged_weights,
    part_of,
    trainable_parameters,
)
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from fovea.train.torch.policy import make_policy
from fovea.wiring.model import make_vlm, open_vlm
from fovea_gym.errors import ConfigError, FoveaError
from fovea_tools.families.tiny import save_tiny_kind
from tests.adapters import OTHER_NAMES, rename_tensors, save_adapter
from tests.hub_models import Loaded, needs_image_processors
from tests.policies import make_batch, weights_of
from tests.reference import gradients, largest_relative_difference, of_row, reference_logprobs, row_of, vlm_of
from tests.saved import save_policy
from tests.tiny_models import CORPUS, CPU, mixed_prompts, packed_logprobs, random_completions, save, tiny

COUNTS = ((4, 6), (3,), (5,))
VISION = ("vision_tower", "projector")
on_parts = pytest.mark.parametrize(
    "adapted_parts", [["language_model"], [*VISION, "language_model"]], ids=["language model", "everywhere"]
)


def with_lora(parts: TinyParts, /, **lora: object) -> TinyParts:
    settings = Model(tiny=TinyModel(), lora=Lora.model_validate(lora))
    choose_trainable(parts.network, settings, seed=0)
    with torch.no_grad():
        for name, parameter in parts.network.named_parameters():
            if "lora_B" in name:  # zero at the start: make the adapters do something
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return parts


def test_targets_and_exclude_are_obeyed(parts: TinyParts) -> None:
    with_lora(parts, rank=2, targets=["q_proj", "o_proj"], exclude=["layers.0"])
    layers = set(lora_layers(parts.network))
    assert {name.split(".")[-1] for name in layers} == {"q_proj", "o_proj"}
    assert not any(".layers.0." in name for name in layers)


@pytest.mark.parametrize("name", ["qproj", "lm_head"])
def test_targets_that_match_nothing_are_refused(name: str, parts: TinyParts) -> None:
    """A head tied to the embedding gets no adapter: the rollout would draw from the head without it."""
    refused = rf"{name} .* matches no linear layer of the language model; leave model\.lora\.targets out"
    with pytest.raises(ConfigError, match=refused):
        with_lora(parts, targets=["q_proj", name])


def test_adapters_on_vision_are_on_all_of_its_linear_layers(parts: TinyParts) -> None:
    """Those of the tower, of its projector, or both; nothing else is trained."""
    family = parts.processor.family
    of_part = {
        part: {name for name in linears(parts) if part_of(name, family) == part.replace("_", " ")} for part in VISION
    }
    assert all(of_part.values())
    for chosen in (*map(list, zip(VISION, strict=True)), [*VISION]):
        again = with_lora(tiny(family.model_type), parts=chosen).network
        assert set(lora_layers(again)) == set().union(*(of_part[part] for part in chosen))
        assert all(".lora_" in name for name in trainable_parameters(again))


def test_a_frozen_tower_has_no_adapters() -> None:
    with pytest.raises(ValidationError, match=r"model\.freeze_vision_tower=true, but model\.lora\.parts"):
        Model(tiny=TinyModel(), freeze_vision_tower=True, lora=Lora(parts=("vision_tower",)))


@on_parts
def test_merged_weights_give_the_adapted_model(adapted_parts: list[str], parts: TinyParts) -> None:
    with_lora(parts, rank=4, parts=adapted_parts)
    merged = dict(merged_weights(parts.network))
    plain = tiny(str(parts.network.config.model_type))
    own = dict(plain.network.named_parameters())
    assert merged.keys() == own.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(merged[name])
    torch.testing.assert_close(packed_logprobs(plain), packed_logprobs(parts), atol=1e-5, rtol=0)


def test_weights_without_adapters_are_not_copied(parts: TinyParts) -> None:
    own = dict(parts.network.named_parameters())
    for name, tensor in merged_weights(parts.network):
        assert tensor.data_ptr() == own[name].data_ptr()


@on_parts
def test_adapters_off_is_the_model_before(adapted_parts: list[str], parts: TinyParts) -> None:
    before = packed_logprobs(parts)
    with_lora(parts, rank=4, parts=adapted_parts)
    with adapters_off(parts.network):
        torch.testing.assert_close(packed_logprobs(parts), before, atol=1e-6, rtol=0)
    assert not torch.allclose(packed_logprobs(parts), before, atol=1e-3)


@on_parts
def test_equal_to_peft_as_its_users_call_it(adapted_parts: list[str], parts: TinyParts) -> None:
    """The same adapters through get_peft_model, weights copied over, give the same log-probs."""
    with_lora(parts, rank=4, alpha=12, parts=adapted_parts)
    expected = packed_logprobs(parts)
    plain = tiny(str(parts.network.config.model_type))
    where = ("language_model", "visual") if len(adapted_parts) > 1 else ("language_model",)
    targets = [name for name in linears(parts) if any(each in name for each in where)]
    wrapped = get_peft_model(plain.network, LoraConfig(r=4, lora_alpha=12, target_modules=targets))
    theirs = dict(wrapped.base_model.model.named_parameters())
    with torch.no_grad():
        for name, parameter in parts.network.named_parameters():
            theirs[name].copy_(parameter)
    torch.testing.assert_close(packed_logprobs(plain), expected, atol=1e-6, rtol=0)


def test_the_table_adds_up(parts: TinyParts) -> None:
    with_lora(parts, rank=4)
    rows = {row.part: row for row in count_parameters(parts.network)}
    assert rows["all"].total == sum(p.numel() for p in parts.network.parameters())
    trained = sum(p.numel() for p in trainable_parameters(parts.network).values())
    assert rows["all"].trainable == rows["LoRA adapters"].total == trained
    assert rows["vision tower"].trainable == 0


def linears(parts: TinyParts) -> list[str]:
    """Names of the linear layers of a model like this one without adapters."""
    network = tiny(parts.network.config.model_type).network
    return [name for name, module in network.named_modules() if isinstance(module, torch.nn.Linear)]


def test_all_linear_is_every_linear_layer_of_the_language_model(parts: TinyParts) -> None:
    """As peft's own: all but the head."""
    with_lora(parts, rank=2, targets="all-linear")
    assert set(lora_layers(parts.network)) == {name for name in linears(parts) if "language_model" in name}


@pytest.mark.parametrize(
    ("exclude", "left_out"),
    [
        (r"layers\.(0|2)\.self_attn", r"\.(0|2)\.self_attn"),
        ([r"down_proj$", ".*visual.*"], "down_proj"),
        (["layers.1."], r"\.1\."),
    ],
)
def test_exclude_takes_regular_expressions(exclude: object, left_out: str) -> None:
    every, some = (set(lora_layers(with_lora(tiny("qwen3_vl"), **more).network)) for more in ({}, {"exclude": exclude}))
    assert some == {name for name in every if not re.search(left_out, name)} < every


def test_an_exclusion_that_excludes_nothing_is_refused(parts: TinyParts) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.exclude: layer\\\.0 matches no linear layer, such as model"):
        with_lora(parts, exclude=[r"layer\.0"])
    with pytest.raises(ValidationError, match="is not a regular expression"):
        Lora.model_validate({"exclude": ["*layers"]})


class OneMask(torch.nn.Dropout):
    """Drops the same inputs of all tokens, so that two forward passes may cut and order the tokens as they like."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        kept = torch.rand(x.shape[-1], generator=torch.Generator().manual_seed(x.shape[-1])) >= self.p
        return x * kept / (1 - self.p)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_dropout_is_pefts_and_of_updates_alone(checkpointing: Recompute) -> None:
    """Values and gradients of peft's layers in transformers' own forward."""
    ours, theirs, without = (tiny("qwen3_vl") for _ in range(3))
    for parts in (ours, theirs, without):
        parts.network.eval()
        with_lora(parts, rank=4, dropout=0.0 if parts is without else 0.3)
    recompute_activations(ours.network, checkpointing)
    torch.testing.assert_close(packed_logprobs(ours), packed_logprobs(without), atol=1e-6, rtol=0)
    row = row_of(ours, COUNTS)
    found = []
    for parts, kind in ((ours, VLM), (theirs, PlainVLM)):
        model = kind(parts.network, parts.processor.banned_ids).train()
        for layer in lora_layers(parts.network).values():
            assert isinstance(layer.lora_dropout[ADAPTER], torch.nn.Dropout)
            layer.lora_dropout[ADAPTER] = OneMask(0.3)
        scores = model(row, temperature=1.0, chunk_tokens=100)
        scores.logprobs_A.sum().backward()
        gradients = {name: x.grad for name, x in trainable_parameters(parts.network).items()}
        found.append((scores.logprobs_A.detach(), gradients))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-3)
    assert (found[0][0] - packed_logprobs(without)).abs().max() > 1e-3


def test_a_group_shares_the_mask_of_its_prompt() -> None:
    """Completions that differ in the last token, which is not an input, differ by the masks of their tokens only."""
    parts = tiny("qwen3_vl")
    with_lora(parts, rank=4, dropout=0.5)
    ids = random_completions([(4,)])[0][0]
    other = np.append(ids[:-1], ids[-1] + 1)
    row = pack_row(parts.processor.family, mixed_prompts(parts)[:1], [[ids, other]], CPU)
    vlm = vlm_of(parts).train()
    with torch.no_grad():
        first, second = vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A.split(4)
    assert first[0] == second[0]
    assert (first[1:-1] != second[1:-1]).all()


def test_on_the_meta_device_no_adapter_is_read_from_disk() -> None:
    """As a plan and a dry run have the network: they ask only for its shapes."""
    parts, settings = tiny("qwen3_vl"), Model(path="x", lora=Lora(rank=4, adapter="no_such_folder"))
    with torch.device("meta"):
        network = type(parts.network)(parts.network.config)
    choose_trainable(network, settings, seed=0)
    assert {parameter.device.type for parameter in trainable_parameters(network).values()} == {"meta"}
    with pytest.raises(FoveaError, match="no_such_folder"):
        choose_trainable(parts.network, settings, seed=0)


GRADIENT_TOLERANCE = 1e-4


def is_projector(name: str) -> bool:
    """By the names that transformers gives the projector of a Qwen-VL."""
    return name.startswith(("model.visual.merger.", "model.visual.deepstack_merger_list."))


def is_tower(name: str) -> bool:
    return name.startswith("model.visual.") and not is_projector(name)


def chosen(parts: TinyParts, **settings: object) -> set[str]:
    choose_trainable(parts.network, Model.model_validate({"tiny": TinyModel(), **settings}), seed=0)
    return set(trainable_parameters(parts.network))


def test_each_is_frozen_by_its_own_setting_and_the_projector_with_the_tower_by_default(parts: TinyParts) -> None:
    names = {name for name, _ in parts.network.named_parameters()}
    tower, projector = set(filter(is_tower, names)), set(filter(is_projector, names))
    assert all([tower, projector])
    assert chosen(parts) == names
    assert chosen(parts, freeze_vision_tower=True) == names - tower - projector
    assert chosen(parts, freeze_vision_tower=True, freeze_projector=False) == names - tower
    assert chosen(parts, freeze_projector=True) == names - projector
    rows = {row.part: row for row in count_parameters(parts.network)}
    assert (rows["vision tower"].trainable, rows["projector"].trainable) == (rows["vision tower"].total, 0)


PARTS = {"projector": {"freeze_vision_tower": True, "freeze_projector": False}, "tower": {"freeze_projector": True}}


@pytest.mark.parametrize("settings", PARTS.values(), ids=PARTS)
def test_gradients_are_those_of_transformers(parts: TinyParts, settings: dict[str, bool]) -> None:
    trained = chosen(parts, **settings)
    of_row(reference_logprobs, parts, mixed_prompts(parts), random_completions(COUNTS)).sum().backward()
    expected = gradients(parts.network)
    assert expected.keys() == trained
    vlm = vlm_of(parts).train()
    assert vlm.trains_vision
    assert vlm.trains_tower is any(map(is_tower, trained))
    vlm(row_of(parts, COUNTS), temperature=1.0, chunk_tokens=100).logprobs_A.sum().backward()
    assert largest_relative_difference(expected, gradients(parts.network)) < GRADIENT_TOLERANCE


@needs_image_processors
def test_the_connector_is_the_projector_of_idefics3(tmp_path: Path) -> None:
    network = Loaded.of(save_tiny_kind("idefics3", tmp_path, CORPUS)).network
    assert projector_modules(network) == [network.model.connector]


def test_adapters_leave_no_projector_to_train() -> None:
    with pytest.raises(ValidationError, match=r"model\.freeze_projector=false, but with model\.lora only adapters"):
        Model(tiny=TinyModel(), lora=Lora(), freeze_projector=False)
    assert not Model(tiny=TinyModel(), lora=Lora()).trains_projector


def test_a_projector_behind_a_frozen_tower_trains_the_vision() -> None:
    assert Model(tiny=TinyModel(), freeze_vision_tower=True, freeze_projector=False).trains_vision


def pefts(folder: Path, **settings: object) -> torch.Tensor:
    """Save an adapter by peft as its users do; returns the log-probs of its model."""
    parts = tiny("qwen3_vl")
    save_adapter(parts.network, folder, **settings)
    return packed_logprobs(parts)


def pefts_with_base(folder: Path) -> torch.Tensor:
    """The folder `adapter`, which names `base` beside it; returns the log-probs of both together."""
    expected = pefts(folder / "adapter")
    file = folder / "adapter" / "adapter_config.json"
    base = {"base_model_name_or_path": str(save(tiny("qwen3_vl"), folder / "base"))}
    file.write_text(json.dumps(json.loads(file.read_text()) | base))
    return expected


def opened_with_its_base(folder: Path) -> OpenedModel:
    target = parse_target(str(folder))
    assert isinstance(target, ModelTarget)
    return open_model(target, Config.model_validate({"model": {"path": target.path, "dtype": "float32"}}), [])


def lora_of(folder: Path, **lora: object) -> dict[str, object]:
    return {"adapter": str(folder), "rank": 4, "alpha": 12, "targets": ["q_proj", "down_proj"], **lora}


def started_from(folder: Path, parts: TinyParts | None = None, **lora: object) -> TinyParts:
    parts = parts or tiny("qwen3_vl")
    settings = Model(tiny=TinyModel(), lora=Lora.model_validate(lora_of(folder, **lora)))
    choose_trainable(parts.network, settings, seed=0)
    return parts


@pytest.mark.parametrize(("old", "new"), [("none of them", ""), *OTHER_NAMES])
def test_an_adapter_under_the_names_of_other_versions(old: str, new: str, tmp_path: Path) -> None:
    """As the start of training, and evaluated with its base, where peft only warns and answers as the base."""
    expected = pefts_with_base(tmp_path)
    rename_tensors(tmp_path / "adapter", old, new)
    started = started_from(tmp_path / "adapter")
    torch.testing.assert_close(packed_logprobs(started), expected, atol=1e-6, rtol=0)
    assert all(".lora_" in name for name in trainable_parameters(started.network))
    opened = opened_with_its_base(tmp_path / "adapter")
    parts = replace(started, network=opened.vlm.network)
    torch.testing.assert_close(packed_logprobs(parts), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("pattern", "new", "message"),
    [
        (r"layers\.0\.mlp", "layers.7.mlp", r"has .*layers\.7\.mlp\.down_proj\.lora_A"),
        (r"\.lora_B\.weight", ".lora_B.bias", r"has .*lora_B\.bias"),
        (r"^base_model\.model\.model", "transformer", r"has transformer\.language_model"),
    ],
)
def test_an_adapter_whose_tensors_have_no_place_is_not_evaluated(
    pattern: str, new: str, message: str, tmp_path: Path
) -> None:
    """peft leaves such tensors out, and answers as the base without them."""
    pefts_with_base(tmp_path)
    rename_tensors(tmp_path / "adapter", pattern, new)
    with pytest.raises(ModelError, match=message):
        opened_with_its_base(tmp_path / "adapter")
    with pytest.raises(ConfigError):
        started_from(tmp_path / "adapter")


def test_an_adapter_without_some_of_its_tensors_is_not_evaluated(tmp_path: Path) -> None:
    pefts_with_base(tmp_path)
    file = tmp_path / "adapter" / ADAPTER_WEIGHTS
    save_file({name: tensor for name, tensor in load_file(file).items() if "layers.1.mlp" not in name}, file)
    with pytest.raises(ModelError, match=r"lacks .*layers\.1\.mlp\.down_proj\.lora_A"):
        opened_with_its_base(tmp_path / "adapter")


def test_the_reference_is_the_adapter_that_training_started_from(tmp_path: Path) -> None:
    """Not the model with its adapters off: a KL term would pull back what the adapter had learnt."""
    pefts(tmp_path)
    model = {"tiny": {}, "lora": lora_of(tmp_path)}
    config = Config.model_validate({"model": model, "algorithm": {"kl": "loss"}})
    policy = make_policy(config, make_vlm(config, tiny("qwen3_vl").network, banned_ids=()))
    batch = make_batch(tiny("qwen3_vl"))
    for start, reference in zip(policy.logprobs(batch), policy.reference_logprobs(batch), strict=True):
        np.testing.assert_allclose(reference, start, atol=1e-6)


def test_a_checkpoint_opens_without_the_folder_it_started_from(tmp_path: Path) -> None:
    pefts(tmp_path / "adapter")
    base = save(tiny("qwen3_vl"), tmp_path / "base")
    config = Config.model_validate({"model": {"path": str(base), "lora": lora_of(tmp_path / "adapter")}})
    policy = make_policy(config, open_vlm(config, config.model, banned_ids=()))
    folder = tmp_path / "run" / "checkpoints" / "step-1"
    folder.mkdir(parents=True)
    save_policy(policy, folder)
    (tmp_path / "run" / "config.yaml").write_text(dump_config(config))
    shutil.rmtree(tmp_path / "adapter")
    target = CheckpointTarget(name="run", folder=folder, run=tmp_path / "run")
    opened = dict(factored_weights(open_checkpoint(target).vlm.network))
    for name, weight in weights_of(policy).items():
        assert torch.equal(opened[name], weight), name


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 8}, r"model\.lora\.rank=8, but the adapter in .* has 4; set model\.lora\.rank=4"),
        ({"alpha": 8}, r"set model\.lora\.alpha=12"),
        ({"targets": ["q_proj"]}, r"set model\.lora\.targets=\[down_proj,q_proj\]"),
        ({"exclude": [r"layers\.0"]}, r"has base_model\.model\..*layers\.0"),
    ],
)
def test_settings_that_are_not_the_folders(lora: dict[str, object], message: str, tmp_path: Path) -> None:
    pefts(tmp_path)
    with pytest.raises(ConfigError, match=message):
        started_from(tmp_path, **lora)


@pytest.mark.parametrize(
    ("key", "value"), [("use_rslora", True), ("init_lora_weights", "pissa"), ("init_lora_weights", "OLoRA")]
)
def test_variants_of_lora_are_refused(key: str, value: object, tmp_path: Path) -> None:
    """peft's own folder of another variant: its tensors have the same names, and mean something else."""
    pefts(tmp_path, **{key: value})
    with pytest.raises(ModelError, match=f"{key}={value} is a variant of LoRA that Fovea does not train"):
        started_from(tmp_path)


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    pefts(tmp_path)
    with pytest.raises(ModelError, match=r"and the model's layer needs .*; the adapter belongs to another model"):
        started_from(tmp_path, tiny("qwen3_vl", hidden_size=96))


def test_pickles_and_rubbish_are_never_read(tmp_path: Path) -> None:
    pefts(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    torch.save({}, tmp_path / "adapter_model.bin")
    whole = weights.read_bytes()
    for damaged in (None, b"", whole[: len(whole) // 2]):
        weights.unlink(missing_ok=True)
        if damaged is not None:
            weights.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors cannot be read"):
            started_from(tmp_path)
    for config in ("", "[]", json.dumps({"r": "four"})):
        (tmp_path / "adapter_config.json").write_text(config)
        with pytest.raises(FoveaError):
            started_from(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"r": 10**9}, {"rank_pattern": {"q_proj": 10**9}}, {"rank_pattern": "q_proj"}, {"lora_dropout": 7.0}]
)
def test_a_number_that_no_adapter_can_have_is_named(wrong: dict[str, object], tmp_path: Path) -> None:
    """Peft would make matrices of it before it reads the tensors."""
    pefts(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    path = str(save(tiny("qwen3_vl"), tmp_path / "base"))
    base = ModelTarget(name="adapter", path=path, adapter=tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"in its adapter_config\.json must be"):
        open_model(base, Config.model_validate({"model": {"tiny": {}}}), [])
