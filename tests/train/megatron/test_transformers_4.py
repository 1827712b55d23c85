"""Fovea's core below transformers 5: the packed forward, and folders that either version wrote."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from fovea.config.model import Model
from fovea.models.load import load_network, save_network
from fovea.models.processor import load_processor
from fovea.models.recompute import Recompute, recompute_activations
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from tests.rollout.drawing import generate, make_engine, seeded
from tests.tiny_models import CPU, mixed_prompts, save, tiny

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
TOLERANCE = 1e-5


def test_this_environment_has_the_version_that_the_bridge_takes() -> None:
    assert transformers.__version__.startswith("4.57.")


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_give_the_log_probs_of_transformers(family: str) -> None:
    """No image, one, and two of unequal size; transformers' own forward makes its own positions."""
    parts = tiny(family)
    network = parts.network
    answer = np.array([5, 17, 3, 40])
    expected = []
    for prompt in mixed_prompts(parts):
        ids = torch.from_numpy(np.concatenate([prompt.token_ids_L, answer]))[None]
        images = [image.tensors for image in prompt.images]
        given = {
            name: torch.from_numpy(join([each[name] for each in images]))
            for name, join in (("pixel_values", np.concatenate), ("image_grid_thw", np.stack))
            if images
        }
        logits = network(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[
            0, prompt.num_tokens - 1 : -1
        ]
        logits[:, list(parts.processor.banned_ids)] = -torch.inf
        expected.append(logits.log_softmax(-1).gather(1, torch.from_numpy(answer)[:, None])[:, 0].detach())
    vlm = VLM(network, parts.processor.banned_ids)
    row = pack_row(vlm.family, mixed_prompts(parts), [[answer]] * 3, CPU)
    scores = vlm(row, temperature=1.0, chunk_tokens=100)
    torch.testing.assert_close(scores.logprobs_A.detach(), torch.cat(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_engine_draws_with_the_log_probs_of_packed_rows(family: str) -> None:
    parts = tiny(family)
    prompts = mixed_prompts(parts)
    groups = generate(make_engine(parts), prompts, seeded(3, max_new_tokens=6, temperature=0.8), n=2)
    row = pack_row(parts.processor.family, prompts, [[c.token_ids_T for c in group] for group in groups], CPU)
    scores = VLM(parts.network, parts.processor.banned_ids)(row, temperature=0.8, chunk_tokens=100)
    drawn = torch.from_numpy(np.concatenate([c.logprobs_T for group in groups for c in group]))
    torch.testing.assert_close(drawn, scores.logprobs_A, atol=TOLERANCE, rtol=0)


def test_experts_are_written_as_they_were_read(tmp_path: Path) -> None:
    """Unlike version 5, 4.57 holds them as files do."""
    parts = tiny("qwen3_vl_moe")
    save_network(VLM(parts.network, parts.processor.banned_ids), tmp_path)
    loaded = dict(load_network(Model(path=str(tmp_path), dtype="float32")).named_parameters())
    assert all(torch.equal(loaded[name], weight) for name, weight in parts.network.named_parameters())


@pytest.mark.parametrize("name", ["TokenizersBackend", "Qwen2Tokenizer"])
def test_a_tokenizer_in_the_names_of_version_5_is_read(name: str, tmp_path: Path) -> None:
    """As transformers 5.23 writes a tokenizer that is all in tokenizer.json, and Qwen's."""
    parts = tiny("qwen3_vl")
    save(parts, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    written = json.loads(config.read_text())
    special = written.pop("additional_special_tokens")
    config.write_text(json.dumps(written | {"tokenizer_class": name, "extra_special_tokens": special}))
    read, text = load_processor(Model(path=str(tmp_path))), "<|im_start|>user\n<|image_pad|>Zoë?<|im_end|>"
    assert read.tokenizer(text).input_ids == parts.processor.tokenizer(text).input_ids
    assert (read.banned_ids, read.stop_ids) == (parts.processor.banned_ids, parts.processor.stop_ids)


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_gradients_are_those_without_checkpointing(family: str) -> None:
    parts = tiny(family)
    answers = [[np.array([5, 17, 3, 40])]] * 3
    gradients = []
    how: Recompute
    for how in ("none", "full"):
        network = copy.deepcopy(parts.network)
        recompute_activations(network, how)
        vlm = VLM(network, parts.processor.banned_ids)
        vlm.train()
        row = pack_row(vlm.family, mixed_prompts(parts), answers, CPU)
        vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A.sum().backward()
        gradients.append({name: weight.grad for name, weight in network.named_parameters()})
    plain, recomputed = gradients
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=TOLERANCE, rtol=0, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_transformers_5_is_the_same_model(family: str, tmp_path: Path) -> None:
    """Version 5 writes the parameters of rotary positions under another key, which 4.57 passes over."""
    parts = tiny(family)
    save(parts, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}
    config.pop("rope_scaling", None), config.pop("rope_theta", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_network(Model(path=str(tmp_path), dtype="float32"))
    for name in ("rope_theta", "rope_scaling"):
        assert getattr(loaded.config.text_config, name) == getattr(parts.network.config.text_config, name)


def test_images_are_resized_to_the_limits_of_the_folder(tmp_path: Path) -> None:
    """4.57 itself takes its defaults in place of `size`, the only name by which version 5 writes limits."""
    save(tiny("qwen3_vl"), tmp_path)
    file = tmp_path / "preprocessor_config.json"
    written = json.loads(file.read_text())
    size = {"shortest_edge": 256, "longest_edge": 1 << 20}
    assert written["size"] == size
    file.write_text(json.dumps({key: x for key, x in written.items() if key not in ("min_pixels", "max_pixels")}))
    processor = load_processor(Model(path=str(tmp_path))).image_processor
    assert processor.size == size
    image = Image.new("RGB", (48, 48), "red")
    assert processor(images=[image])["image_grid_thw"].tolist() == [[1, 6, 6]], "it has been enlarged"
    assert type(processor).__name__ == written["image_processor_type"] == "Qwen2VLImageProcessor"
