"""Folders of strangers whose template, tokenizer or processor fails or does not end: each is named in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fovea.commands.serve import ServedModel, ServerAddress, serve
from fovea.config.model import Model
from fovea.errors import ModelError
from fovea.models.tiny import CHAT_TEMPLATE
from fovea.rollout.server import Launch, ModelServer
from fovea.wiring import model_trial
from fovea.wiring.frames import ModelPictures
from fovea.wiring.grading import reward_scorer
from fovea.wiring.model_trial import try_model
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.rewards import RewardModel
from fovea_gym.types import ImageRef
from tests.environments.reward_model import save_reward_model
from tests.tiny_models import save, tiny


def template(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def changed(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values))

    return change


MULTIPLYING = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000} for _ in range(6)],
}
ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
LONG = "{% for i in range(100) %}{{ 'x' * 30000000 }}{% endfor %}"
STRANGERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "endless template": (template(ENDLESS), r"the chat template \(chat_template.jinja\) did not end within 5 s"),
    "long output": (template(LONG), r"the chat template \(chat_template.jinja\) (writes|takes more than|ended its)"),
    "a template without pictures": (
        template(CHAT_TEMPLATE.replace("<|image_pad|>", "")),
        r"the model's chat template leaves out pictures \(it writes 0 of 1\)",
    ),
    "a template without answers": (
        template(
            CHAT_TEMPLATE.replace(
                "{%- for message in messages -%}", "{%- for message in messages if message.role == 'user' -%}"
            )
        ),
        "the model's chat template does not write the answers of an assistant",
    ),
    "a template that refuses": (template("{{ raise_exception('no') }}"), "no"),
    "a tokenizer that multiplies": (changed("tokenizer.json", normalizer=MULTIPLYING), r"tokenizer\.json"),
    "another image id": (changed("config.json", image_token_id=5), "image_token_id=5"),
    "an image id that no token has": (changed("config.json", image_token_id=10**6), "image_token_id=1000000"),
    "another patch": (
        changed("preprocessor_config.json", merge_size=3),
        "merge_size=3 in its preprocessor_config.json",
    ),
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
def test_a_reward_model_passes_the_same_trial(
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_attention_heads": 0},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 15},
        {"num_labels": 10**12},
        {"rms_norm_eps": float("nan")},
        {"hidden_act": "none"},
        {"rope_parameters": 5},
    ],
)
def test_a_reward_model_whose_config_no_model_can_have_is_named(wrong: dict[str, Any], tmp_path: Path) -> None:
    save_reward_model(tmp_path)
    changed("config.json", **wrong)(tmp_path)
    with pytest.raises(ModelError, match=r"^reward_model\.path=") as error:
        reward_scorer(RewardModel(path=str(tmp_path)))
    assert "\n" not in str(error.value)


def test_pictures_and_servers_try_the_folder_before_they_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
