"""A folder in peft's format, written by peft, as the start of training."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fovea.commands.targets import (
    CheckpointTarget,
    ModelTarget,
    OpenedModel,
    open_checkpoint,
    open_model,
    parse_target,
)
from fovea.config.loading import dump_config
from fovea.config.model import Lora, Model, TinyModel
from fovea.config.run import Config
from fovea.errors import ModelError
from fovea.models.adapter_files import ADAPTER_WEIGHTS
from fovea.models.tiny import TinyParts
from fovea.models.trainable import choose_trainable, factored_weights, trainable_parameters
from fovea.train.torch.policy import make_policy
from fovea.wiring.model import make_vlm, open_vlm
from fovea_gym.errors import ConfigError, FoveaError
from tests.adapters import OTHER_NAMES, rename_tensors, save_adapter
from tests.policies import make_batch, weights_of
from tests.saved import save_policy
from tests.tiny_models import packed_logprobs, save, tiny


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


def started_from(folder: Path, **lora: object) -> TinyParts:
    settings = {"adapter": str(folder), "rank": 4, "alpha": 12, "targets": ["q_proj", "down_proj"], **lora}
    parts = tiny("qwen3_vl")
    choose_trainable(parts.network, Model(tiny=TinyModel(), lora=Lora.model_validate(settings)), seed=0)
    return parts


def test_training_starts_from_pefts_adapter(tmp_path: Path) -> None:
    expected = pefts(tmp_path)
    parts = started_from(tmp_path)
    torch.testing.assert_close(packed_logprobs(parts), expected, atol=1e-6, rtol=0)
    assert all(".lora_" in name for name in trainable_parameters(parts.network))


@pytest.mark.parametrize(("old", "new"), OTHER_NAMES)
def test_an_adapter_under_the_names_of_other_versions(old: str, new: str, tmp_path: Path) -> None:
    """As the start of training, and evaluated with its base, where peft only warns and answers as the base."""
    expected = pefts_with_base(tmp_path)
    rename_tensors(tmp_path / "adapter", old, new)
    started = started_from(tmp_path / "adapter")
    torch.testing.assert_close(packed_logprobs(started), expected, atol=1e-6, rtol=0)
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
    lora = {"adapter": str(tmp_path), "rank": 4, "alpha": 12, "targets": ["q_proj", "down_proj"]}
    config = Config.model_validate({"model": {"tiny": {}, "lora": lora}, "algorithm": {"kl": "loss"}})
    policy = make_policy(config, make_vlm(config, tiny("qwen3_vl").network, banned_ids=()))
    batch = make_batch(tiny("qwen3_vl"))
    for start, reference in zip(policy.logprobs(batch), policy.reference_logprobs(batch), strict=True):
        np.testing.assert_allclose(reference, start, atol=1e-6)


def test_a_checkpoint_opens_without_the_folder_it_started_from(tmp_path: Path) -> None:
    pefts(tmp_path / "adapter")
    base = save(tiny("qwen3_vl"), tmp_path / "base")
    lora = {"adapter": str(tmp_path / "adapter"), "rank": 4, "alpha": 12, "targets": ["q_proj", "down_proj"]}
    config = Config.model_validate({"model": {"path": str(base), "lora": lora}})
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
    ("lora", "error", "message"),
    [
        ({"rank": 8}, ConfigError, r"model\.lora\.rank=8, but the adapter in .* has 4; set model\.lora\.rank=4"),
        ({"alpha": 8}, ConfigError, r"set model\.lora\.alpha=12"),
        ({"targets": ["q_proj"]}, ConfigError, r"set model\.lora\.targets=\[down_proj,q_proj\]"),
        ({"exclude": [r"layers\.0"]}, ConfigError, r"has base_model\.model\..*layers\.0"),
    ],
)
def test_settings_that_are_not_the_folders(lora: dict[str, object], error: type, message: str, tmp_path: Path) -> None:
    pefts(tmp_path)
    with pytest.raises(error, match=message):
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
    parts = tiny("qwen3_vl", hidden_size=96)
    lora = Lora(adapter=str(tmp_path), rank=4, alpha=12, targets=("q_proj", "down_proj"))
    with pytest.raises(
        ModelError, match=r"is \[.*\] and the model's layer needs \[.*\]; the adapter belongs to another model"
    ):
        choose_trainable(parts.network, Model(tiny=TinyModel(), lora=lora), seed=0)


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
    base = ModelTarget(
        name="adapter", path=str(save(tiny("qwen3_vl"), tmp_path / "base")), adapter=tmp_path / "adapter"
    )
    config = Config.model_validate({"model": {"tiny": {}}})
    with pytest.raises(ModelError, match=r"in its adapter_config\.json must be"):
        open_model(base, config, [])
