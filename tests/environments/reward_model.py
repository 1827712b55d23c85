"""A tiny reward model that transformers can load."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from fovea.models.tiny import build_tokenizer

TEXTS = ["A red square on white ground.", "Green, all green, with no border at all!", "blue"]


def save_reward_model(folder: Path, *, num_labels: int = 1) -> LlamaForSequenceClassification:
    tokenizer = build_tokenizer(TEXTS * 10, 300)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(num_labels=num_labels, **sizes, **ids)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
