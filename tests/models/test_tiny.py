"""Tokenizers: of a tiny model, and of files written for transformers 4 and 5."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import torch
from torch.nn.functional import softplus
from transformers import AutoTokenizer

from fovea.config.model import Model
from fovea.models.load import load_network
from fovea.models.model_files import save_tokenizer
from fovea.models.tiny import MAX_CORPUS_CHARS, MAX_TEXT_CHARS, build_tokenizer, save_tiny
from fovea.rollout.checks import checkpoint_shapes
from tests.tiny_models import tiny

CORPUS = ["How many circles are there?", "What colour is the square?", "red", "blue"] * 20
TRAIN = """
import random
from fovea.models.tiny import build_tokenizer
word = "".join(random.Random(0).choices("abcdefghij", k=1_000_000))
print(len(build_tokenizer(["How many circles are there?", word], 2000)))
"""


def test_a_row_of_a_megabyte_without_spaces_is_no_hang() -> None:
    """In a separate process, since nothing else could end a trainer that hangs."""
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=False, timeout=100)
    assert int(done.stdout) > 300, done.stderr


def test_only_the_starts_of_texts_are_trained_on() -> None:
    tail = "".join(random.Random(1).choices("vwxyz", k=100))
    long = [*CORPUS, "a" * MAX_TEXT_CHARS + tail * 30]
    cut = [*CORPUS, "a" * MAX_TEXT_CHARS]
    assert build_tokenizer(long, 400).get_vocab() == build_tokenizer(cut, 400).get_vocab()
    filled = ["b " * (MAX_TEXT_CHARS // 2)] * (MAX_CORPUS_CHARS // MAX_TEXT_CHARS)
    assert build_tokenizer([*filled, *CORPUS], 400).get_vocab() == build_tokenizer(filled, 400).get_vocab()
    assert build_tokenizer(CORPUS, 400).decode(build_tokenizer(CORPUS, 400).encode(tail)) == tail


def test_experts_are_written_as_the_hub_holds_them(tmp_path: Path) -> None:
    """[experts, inputs, outputs], which vLLM and SGLang read, and transformers gives back as they were."""
    parts = tiny("qwen3_vl_moe")
    save_tiny(parts, tmp_path / "model")
    experts = "model.language_model.layers.0.mlp.experts"
    shapes = checkpoint_shapes(str(tmp_path / "model"), None, is_tied=False)
    assert (shapes[f"{experts}.gate_up_proj"], shapes[f"{experts}.down_proj"]) == ((4, 64, 256), (4, 128, 64))
    again = load_network(Model(path=str(tmp_path / "model"), dtype="float32"))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), parts.network.parameters(), strict=True))


def test_most_heads_of_a_new_delta_net_remember_a_prompt() -> None:
    """A tenth of a state is left after the 25 tokens of a prompt of the demo."""
    named = dict(tiny("qwen3_5", num_layers=12).network.named_parameters())
    biases = {name: bias for name, bias in named.items() if name.endswith("dt_bias")}
    left = [
        (-25 * named[name.replace("dt_bias", "A_log")].exp() * softplus(bias)).exp() for name, bias in biases.items()
    ]
    assert (torch.cat(left) > 0.1).float().mean() > 0.5


TEXT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>How many, Zoë?<|im_end|>\n"


def test_a_tokenizer_is_written_in_names_that_both_versions_read(tmp_path: Path) -> None:
    tokenizer = tiny("qwen3_vl").processor.tokenizer
    save_tokenizer(tokenizer, tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast", "version 4 has no class for any tokenizer.json"
    # version 4 asks extra_special_tokens for its keys
    assert not isinstance(written.get("extra_special_tokens"), list)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert read(TEXT).input_ids == tokenizer(TEXT).input_ids
    assert set(read.all_special_tokens) == set(tokenizer.all_special_tokens)
    assert (read.eos_token_id, read.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert len(read) == len(tokenizer)


def test_a_tokenizer_with_a_class_of_its_own_keeps_it(tmp_path: Path) -> None:
    save_tokenizer(tiny("qwen3_vl").processor.tokenizer, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    save_tokenizer(AutoTokenizer.from_pretrained(tmp_path), tmp_path / "again")
    written = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["tokenizer_class"] in ("Qwen2Tokenizer", "Qwen2TokenizerFast")
    assert not isinstance(written.get("extra_special_tokens"), list)
