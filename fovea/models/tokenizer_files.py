"""Files of a tokenizer that transformers 4 and 5 read alike: vLLM, SGLang and Megatron may have either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = "tokenizer_config.json"
GENERIC = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""The class of a tokenizer that is all in tokenizer.json, by its name in transformers 5 and the one that both know."""


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer of transformers as `save_pretrained` does, under the names that version 4 has for its settings.

    Version 5 reads those too, while version 4 fails on the list and the class that version 5 writes.
    """
    tokenizer.save_pretrained(folder)
    file = folder / CONFIG
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = GENERIC.get(settings["tokenizer_class"], settings["tokenizer_class"])
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
