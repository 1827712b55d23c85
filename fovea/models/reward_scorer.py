"""A reward model from a folder in transformers' format: a sequence classifier with one output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from PIL.Image import Image
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BatchEncoding

from fovea.errors import ModelError
from fovea.models.model_files import UNREADABLE
from fovea.models.processor import special_marks
from fovea.utils.config_keys import check_config_keys
from fovea_gym.errors import ScoreError, first_line
from fovea_gym.settings.rewards import RewardModel
from fovea_gym.utils.shown_text import without_marks

DAMAGED: tuple[type[Exception], ...] = (
    *UNREADABLE,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
)
"""Errors that transformers raises for missing or damaged files of a folder."""


class RewardScorer:
    """Scores an answer to a question. It reads only text: it knows about the image only what the question says."""

    def __init__(self, settings: RewardModel) -> None:
        """Load weights from safetensors and code from transformers only; ModelError if something is missing."""
        self._path = path = Path(settings.path)
        self._tokenizer = load_reward_tokenizer(path)
        with _unreadable(path):
            model = AutoModelForSequenceClassification.from_pretrained(
                path, local_files_only=True, use_safetensors=True, trust_remote_code=False
            )
        if model.config.num_labels != 1:
            raise ModelError(
                f"reward_model.path={path} has {model.config.num_labels} outputs, but a reward is one "
                "number; name a model with num_labels=1"
            )
        self._marks = special_marks(self._tokenizer)
        self._model = model.eval().to(settings.device)
        self._lock = Lock()

    def score(self, question: str, answer: str, images: Sequence[Image] = ()) -> float:
        """The logistic function of the model's output: 0..1. `images` are ignored."""
        encoded = encoded_answer(self._tokenizer, question, without_marks(answer, self._marks))
        length, limit = encoded["input_ids"].shape[1], getattr(self._model.config, "max_position_embeddings", None)
        if limit is not None and length > limit:
            raise ScoreError(
                f"the reward model {self._path} reads {limit} tokens, but question and answer have {length}; lower "
                "rollout.max_new_tokens"
            )
        with self._lock, torch.inference_mode():
            logits = self._model(**encoded.to(self._model.device)).logits
        return float(torch.sigmoid(logits[0, 0].float()))


def load_reward_tokenizer(path: Path) -> Any:
    """The tokenizer in a reward model's folder; ModelError if its files cannot be used."""
    if not list(path.glob("*.safetensors")):
        raise ModelError(
            f"reward_model.path={path} holds no *.safetensors (other formats can run code); name the "
            "folder of a sequence classifier saved as safetensors"
        )
    with _unreadable(path):
        check_config_keys(str(path), "main", "reward_model.path")
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def encoded_answer(tokenizer: Any, question: str, answer: str) -> BatchEncoding:
    """Token ids of a question and its answer, with the chat template if the tokenizer has one."""
    if tokenizer.chat_template is None:
        encoded = tokenizer(question, answer, return_tensors="pt")
    else:
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        encoded = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
    assert isinstance(encoded, BatchEncoding), type(encoded)
    return encoded


@contextmanager
def _unreadable(path: Path) -> Iterator[None]:
    """Turn the errors that transformers raises for missing, damaged or mismatched files into ModelError."""
    try:
        yield
    except ModelError:
        raise
    except DAMAGED as error:
        raise ModelError(f"reward_model.path={path} cannot be loaded ({first_line(error)}); correct it") from error
