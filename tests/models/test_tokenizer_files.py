"""Tokenizers written for transformers 4 and 5 alike."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from fovea.models.model_files import save_tokenizer
from tests.tiny_models import tiny

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
