"""A family without a fast path: Idefics 3 against transformers' own processor and forward, trained and exported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Idefics3Processor,
    SuppressTokensLogitsProcessor,
)

from fovea.commands.exporting.export import VIDEO_PROCESSOR_FILE, export
from fovea.commands.targets import find_checkpoint, open_checkpoint
from fovea.config.model import Model
from fovea.errors import ConfigError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.models.families.idefics3 import Idefics3
from fovea.models.load import load_network
from fovea.models.plain import PlainVLM
from fovea.models.processor import load_processor
from fovea.models.render import Renderer
from fovea.models.trainable import merged_weights
from fovea.models.transformers_versions import image_processor_class
from fovea.rollout.embedded.plain import PlainEngine
from fovea.tools.families.tiny import PATCHES
from fovea.train.packing import pack_row
from fovea.types import ImageRef, Message, Sampling
from fovea.wiring.run import build
from tests.hub_models import assert_scored, save_idefics3
from tests.plain_runs import run_settings, train_and_export
from tests.rollout.drawing import generate
from tests.tiny_models import CPU, from_array, image, random_completions, user

CHATS = {
    "no image": user("How many circles are there?"),
    "one image": user(image(1), "How many circles are there?"),
    "images of other sizes among text": user("Compare ", image(2, 70, 40), " with ", image(3, 33, 90), "\nnow."),
}


def renderer(folder: Path) -> Renderer:
    return Renderer(load_processor(Model(path=str(folder))), from_array)


def pictures(messages: list[Message]) -> list[Image.Image]:
    return [from_array(part) for message in messages for part in message.parts if isinstance(part, ImageRef)]


def inputs_of_transformers(folder: Path, messages: list[Message]) -> dict[str, torch.Tensor]:
    """By its own processor class."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Idefics3Processor(load_processor(Model(path=str(folder))).image_processor, tokenizer, PATCHES // 4)
    text = renderer(folder).text(messages)
    return dict(processor(text=text, images=[pictures(messages)], return_tensors="pt"))


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("chat", CHATS)
def test_prompts_equal_transformers_processor(chat: str, splits: bool, tmp_path: Path) -> None:
    folder = save_idefics3(tmp_path, splits=splits)
    prompt = renderer(folder).prompt(CHATS[chat])
    if not prompt.images:
        assert prompt.token_ids_L.tolist() == prompt.unexpanded_ids_U.tolist()
        return
    expected = inputs_of_transformers(folder, CHATS[chat])
    assert prompt.token_ids_L.tolist() == expected["input_ids"][0].tolist()
    tiles = np.concatenate([each.tensors["pixel_values"] for each in prompt.images])
    np.testing.assert_array_equal(tiles, expected["pixel_values"][0].numpy())
    assert (len(tiles) > len(prompt.images)) is splits


@pytest.mark.parametrize("splits", [False, True])
def test_logprobs_and_draws_equal_transformers(splits: bool, tmp_path: Path) -> None:
    """The padded pass, transformers' own forward by its own processor's inputs, and the engine's decoding."""
    folder = save_idefics3(tmp_path, splits=splits)
    processor, network = load_processor(Model(path=str(folder))), load_network(Model(path=str(folder)))
    prompts = [renderer(folder).prompt(chat) for chat in CHATS.values()]
    completions = random_completions([(5, 3), (4,), (2, 6)])
    vlm = PlainVLM(network, processor.banned_ids)
    row = pack_row(vlm.family, prompts, completions, CPU)
    expected = []
    with torch.no_grad():
        found = vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A
        for chat, prompt, group in zip(CHATS.values(), prompts, completions, strict=True):
            pixels = inputs_of_transformers(folder, chat) if prompt.images else {}
            for completion in group:
                ids = torch.from_numpy(np.concatenate([prompt.token_ids_L, completion]))[None]
                given = {key: pixels[key] for key in ("pixel_values", "pixel_attention_mask") if pixels}
                logits = network(input_ids=ids, **given).logits[0, prompt.num_tokens - 1 : -1]
                logits = SuppressTokensLogitsProcessor(processor.banned_ids)(ids, logits)
                expected.append(logits.log_softmax(-1).gather(1, torch.from_numpy(completion)[:, None])[:, 0])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=0)
    engine = PlainEngine(vlm, processor, max_batch_tokens=10_000)
    engine.load_weights(dict(network.named_parameters()), version=0)
    groups = generate(engine, prompts, [Sampling(max_new_tokens=8, seed=seed) for seed in range(3)], n=2)
    assert_scored(vlm, prompts, groups)


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm.kl": {"coef": 0.01}},
        {"model.lora.rank": 4, "train.gradient_checkpointing": "selective"},
        {"algorithm.name": "ppo", "model.freeze_vision_tower": True},
    ],
    ids=["grpo", "lora", "ppo"],
)
def test_it_trains_passes_the_parity_gate_and_is_exported(settings: dict[str, object], tmp_path: Path) -> None:
    model = save_idefics3(tmp_path / "model")
    folder = tmp_path / "run"
    train_and_export(folder, tmp_path / "out", model, settings)
    parity = json.loads((folder / "parity.json").read_text())
    assert {kind["kind"]: kind["mean_abs"] < 1e-5 for kind in parity["prompts"]} == {
        "with images": True,
        "without images": True,
    }
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    trained = merged_weights(open_checkpoint(find_checkpoint(folder)).vlm.network)
    exported = dict(plain.named_parameters())
    assert all(torch.equal(exported[name], tensor) for name, tensor in trained)
    base = dict(AutoModelForImageTextToText.from_pretrained(model).named_parameters())
    vision_moved = any(
        not torch.equal(base[name], exported[name]) for name in base if "vision_model" in name or "connector" in name
    )
    assert vision_moved is ("algorithm.kl" in settings), "the tower is frozen with LoRA, and where that is set"
    assert any(not torch.equal(base[name], exported[name]) for name in base if "text_model.layers" in name)
    # `AutoImageProcessor` of transformers 5.17 asks for torchvision
    image_processor = image_processor_class("Idefics3ImageProcessor").from_pretrained(tmp_path / "out")
    assert image_processor.max_image_size == {"longest_edge": 48}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_a_video_processor_needs_no_key_of_qwens_image_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export has what the image processor has of the keys that both share."""
    train(build(run_settings(tmp_path / "run", save_idefics3(tmp_path / "model"), max_steps=1)))
    monkeypatch.setattr(Idefics3, "video_processor", "SmolVLMVideoProcessor")
    export(tmp_path / "run", tmp_path / "out")
    written = json.loads((tmp_path / "out" / VIDEO_PROCESSOR_FILE).read_text())
    assert written.keys() == {"video_processor_type", "image_mean", "image_std"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model.max_pixels": 1000}, r"Idefics 3 makes tiles of one size of every image; leave them out"),
        (
            {"rollout.engine.decode_weights": "int8", "algorithm.importance_sampling_fix": True},
            r"transformers' own forward .*; set rollout\.engine\.decode_weights=exact",
        ),
        (
            {"train.backend.liger_kernels": True},
            r"train\.backend\.liger_kernels is set, but .* own forward .*; leave it out",
        ),
        ({"model.attention": "eager"}, r"model\.attention is set, but .* own forward .*; leave it out"),
    ],
)
def test_settings_of_the_fast_path_are_refused(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    model = save_idefics3(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        build(run_settings(tmp_path / "run", model, **settings))


def test_a_qwen_runs_by_the_plain_path_on_request(tmp_path: Path) -> None:
    """The same run by both paths: the same rewards in its first step, drawn by the same weights."""
    rewards = []
    for path in ("auto", "off"):
        model = {"model.path": None, "model.tiny": {}, "model.fast_path": path}
        train(build(run_settings(tmp_path / path, tmp_path, **model)))
        rewards.append(read_metrics(tmp_path / path)[0]["reward"])
    assert rewards[0] == rewards[1]


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("size", [(20, 20), (48, 130), (300, 40), (97, 64)])
def test_the_count_by_size_never_exceeds_the_prompt(splits: bool, size: tuple[int, int], tmp_path: Path) -> None:
    """It counts the visual tokens, and leaves out those around the tiles of an image."""
    render = renderer(save_idefics3(tmp_path, splits=splits))
    chat = user(image(1, *size), "How many?")
    prompt = render.prompt(chat)
    assert render.fewest_tokens(chat) == prompt.images[0].num_tokens
    assert render.fewest_tokens(chat) < prompt.num_tokens
