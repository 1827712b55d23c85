"""A tiny Idefics 3 of transformers' own classes, as a folder; nothing about it is known to Fovea but the family."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from tests.tiny_models import CORPUS

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<end_of_utterance>",
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + ':' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '<image>' }}{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<end_of_utterance>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}
"""
SIDE_PX, PATCH_PX, SHUFFLE = 48, 8, 2
TILE_TOKENS = (SIDE_PX // PATCH_PX // SHUFFLE) ** 2


def make_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    bpe.train_from_iterator(["user:", "Assistant:", *corpus], trainer)
    bpe.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<end_of_utterance>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_network(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Idefics3ForConditionalGeneration:
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "initializer_range": 0.1,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE_PX,
            "patch_size": PATCH_PX,
            "initializer_range": 0.1,
        },
        scale_factor=SHUFFLE,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Idefics3ForConditionalGeneration(config)
    assert network.generation_config is not None
    network.generation_config.eos_token_id = tokenizer.eos_token_id
    return network.eval()


def save_idefics3(folder: Path, corpus: Iterable[str] = CORPUS, *, splits: bool = False, seed: int = 0) -> Path:
    """The files of a hub repository; `splits`: images are cut into tiles."""
    tokenizer = make_tokenizer(corpus)
    make_network(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Idefics3ImageProcessorPil(
        do_image_splitting=splits,
        size={"longest_edge": 2 * SIDE_PX if splits else SIDE_PX},
        max_image_size={"longest_edge": SIDE_PX},
    ).save_pretrained(folder)
    return folder
