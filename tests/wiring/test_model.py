"""Models that one of two processes reads, and folders of strangers that fail, each named in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fovea.commands.serve import ServedModel, ServerAddress, serve
from fovea.config.model import Model
from fovea.errors import ModelError
from fovea.models.load import load_network
from fovea.models.tiny import CHAT_TEMPLATE, save_tiny
from fovea.rollout.server import Launch, ModelServer
from fovea.train.ranks import Ranks
from fovea.wiring import model_trial
from fovea.wiring.frames import ModelPictures
from fovea.wiring.grading import reward_scorer
from fovea.wiring.model import load_on_ranks
from fovea.wiring.model_trial import try_model
from fovea_gym.errors import FoveaError
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.rewards import RewardModel
from fovea_gym.types import ImageRef
from tests.environments.reward_model import save_reward_model
from tests.process_ranks import run_group
from tests.tiny_models import CPU, FAMILIES, save, tiny

DTYPES = ("float32", "bfloat16")


def process(rank: int, folder: Path) -> None:
    """Each rank has a separate folder, the second one without any weights."""
    ranks = Ranks.of_process_group("cpu")
    found: dict[str, Any] = {}
    for family in FAMILIES:
        for dtype in DTYPES:
            settings = Model(path=str(folder / str(rank) / family), dtype=dtype)
            network = load_on_ranks(settings, CPU, ranks)
            found[f"{family} {dtype}"] = {
                "tensors": dict(network.named_parameters()) | dict(network.named_buffers()),
                "is_tied": network.get_input_embeddings().weight is network.get_output_embeddings().weight,
                "trains": {name for name, x in network.named_parameters() if x.requires_grad},
                "training": network.training,
                "config": str(network.config.to_dict()).replace(settings.name, ""),
                "attention": network.config._attn_implementation,
            }
    try:
        load_on_ranks(Model(path=str(folder / str(rank) / "damaged")), CPU, ranks)
    except FoveaError as error:
        found["damaged"] = f"{type(error).__name__}: {error}"
    torch.save(found, folder / f"found-{rank}")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("loading")
    for family in FAMILIES:
        save_tiny(tiny(family), folder / "0" / family)
    shutil.copytree(folder / "0" / FAMILIES[0], folder / "0/damaged")
    shutil.copytree(folder / "0", folder / "1", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "0/damaged/model.safetensors").write_bytes(b"damaged")
    run_group(process, folder)
    first, second = (torch.load(folder / f"found-{rank}", weights_only=False) for rank in range(2))
    return first, second, folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_process_without_the_weights_has_the_network_of_the_first(
    family: str, dtype: str, ends: tuple[dict[str, Any], dict[str, Any], Path]
) -> None:
    """Bit for bit and in the same types, rotary frequencies included, and as a single process reads it."""
    first, second, folder = ends
    ours, theirs = first[f"{family} {dtype}"], second[f"{family} {dtype}"]
    alone = load_network(Model(path=str(folder / "0" / family), dtype=dtype))
    tensors = dict(alone.named_parameters()) | dict(alone.named_buffers())
    for found in (ours["tensors"], theirs["tensors"]):
        assert list(found) == list(tensors)
        assert all(found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in tensors.items())
    assert {**ours, "tensors": None} == {**theirs, "tensors": None}


def test_an_error_of_the_first_process_is_raised_in_all(ends: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    first, second, _ = ends
    assert first["damaged"].startswith("ModelError: model.path=")
    assert "rank 0: model.path=" in second["damaged"]


def template(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def changed(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values))

    return change


THOUSANDFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
MULTIPLYING = {"type": "Sequence", "normalizers": [THOUSANDFOLD] * 6}
ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
LONG = "{% for i in range(100) %}{{ 'x' * 30000000 }}{% endfor %}"
MESSAGES = "{%- for message in messages"
STRANGERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "endless template": (template(ENDLESS), r"the chat template \(chat_template.jinja\) did not end within 5 s"),
    "long output": (template(LONG), r"the chat template \(chat_template.jinja\) (writes|takes more than|ended its)"),
    "a template without pictures": (
        template(CHAT_TEMPLATE.replace("<|image_pad|>", "")),
        r"the model's chat template leaves out pictures \(it writes 0 of 1\)",
    ),
    "a template without answers": (
        template(CHAT_TEMPLATE.replace(f"{MESSAGES} -%}}", f"{MESSAGES} if message.role == 'user' -%}}")),
        "the model's chat template does not write assistant messages",
    ),
    "a template that refuses": (template("{{ raise_exception('no') }}"), "no"),
    "a tokenizer that multiplies": (changed("tokenizer.json", normalizer=MULTIPLYING), r"tokenizer\.json"),
    "another image id": (changed("config.json", image_token_id=5), "image_token_id=5"),
    "an image id that no token has": (changed("config.json", image_token_id=10**6), "image_token_id=1000000"),
    "another patch": (changed("preprocessor_config.json", merge_size=3), "merge_size=3 in its preprocessor_config"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_what_fails_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, cause = STRANGERS[name]
    if name == "endless template":
        monkeypatch.setattr(model_trial, "CPU_SECONDS", 5)
    folder = save(tiny("qwen3_vl"), tmp_path)
    change(folder)
    with pytest.raises(ModelError, match=cause) as error:
        try_model(Model(path=str(folder)))
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5"])
def test_an_ordinary_folder_passes(family: str, tmp_path: Path) -> None:
    try_model(Model(path=str(save(tiny(family), tmp_path))))


@pytest.mark.parametrize("reads_images", [False, True])
@pytest.mark.parametrize("name", ["endless template", "a tokenizer that multiplies"])
def test_a_reward_model_is_tried_too(
    name: str, reads_images: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, cause = STRANGERS[name]
    monkeypatch.setattr(model_trial, "CPU_SECONDS", 5)
    if reads_images:
        save(tiny("qwen3_vl"), tmp_path)
    else:
        save_reward_model(tmp_path)
    change(tmp_path)
    with pytest.raises(ModelError, match=cause) as error:
        reward_scorer(RewardModel(path=str(tmp_path)))
    assert str(error.value).startswith(f"reward_model.path={tmp_path}: ")


WRONG = {
    **{"num_attention_heads": 0, "num_hidden_layers": 10**9, "hidden_size": 15, "num_labels": 10**12},
    **{"rms_norm_eps": float("nan"), "hidden_act": "none", "rope_parameters": 5},
}


@pytest.mark.parametrize("wrong", [{name: value} for name, value in WRONG.items()])
def test_a_reward_model_whose_config_no_model_can_have_is_named(wrong: dict[str, Any], tmp_path: Path) -> None:
    save_reward_model(tmp_path)
    changed("config.json", **wrong)(tmp_path)
    with pytest.raises(ModelError, match=r"^reward_model\.path=") as error:
        reward_scorer(RewardModel(path=str(tmp_path)))
    assert "\n" not in str(error.value)


def test_pictures_and_servers_try_the_folder_before_its_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_trial, "CPU_SECONDS", 5)
    folder = save(tiny("qwen3_vl"), tmp_path)
    template(ENDLESS)(folder)
    pictures = ModelPictures(Model(path=str(folder)), ImageOpener(max_image_mib=1, max_image_megapixels=1))
    image = Image.new("RGB", (64, 64), "red")
    with pytest.raises(ModelError, match="did not end"):
        pictures.seen(ImageRef(source=image))

    def launch(server: ModelServer) -> Launch:
        raise AssertionError(server)

    with pytest.raises(ModelError, match="did not end"):
        serve(ServedModel(source=str(folder)), ServerAddress(port=0), launch, print, start_seconds=1)
