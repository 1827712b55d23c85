"""TRL's side of the comparisons: GRPOTrainer on the same weights and rows.

TRL needs a processor, and transformers' processor needs torchvision only for videos, so a subclass without a video
processor is used. The settings are the fastest for a CPU: no gradient checkpointing and no KL. For a model in bfloat16,
the optimizer updates the bfloat16 weights directly.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import TrainerCallback
from transformers.processing_utils import ProcessorMixin
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.cases import Case, make_parts, make_tasks, reward_of
from benchmarks.ours import LEARNING_RATE
from benchmarks.timing import Clock, StepTimes
from fovea.models.tiny import TinyParts


class ImageProcessor(transformers.Qwen3VLProcessor):
    """The transformers processor without support for videos."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
        for name in ("image", "video", "vision_start", "vision_end"):
            token = f"<|{name}_pad|>" if name in ("image", "video") else f"<|{name}|>"
            setattr(self, f"{name}_token", token)
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))


class TimedTrainer(GRPOTrainer):
    """TRL's trainer, which also times its rollouts."""

    clock: Clock = perf_counter
    rollout_seconds = 0.0
    tokens = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = self.clock()
        outputs = super()._generate_and_score_completions(inputs)
        self.rollout_seconds += self.clock() - started
        self.tokens += float(outputs["completion_mask"].sum())
        return outputs


class StepTimer(TrainerCallback):
    """A callback that times each step, including the reading of its rows, and then calls `after`."""

    def __init__(self, after: Callable[[StepTimes], None]) -> None:
        self._after = after
        self.trainer: TimedTrainer | None = None
        self._started = 0.0

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self._restart()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        assert self.trainer is not None
        whole, rollout = self.trainer.clock() - self._started, self.trainer.rollout_seconds
        self._after(StepTimes(step=whole, rollout=rollout, train=whole - rollout, tokens=self.trainer.tokens))
        self._restart()

    def _restart(self) -> None:
        assert self.trainer is not None
        self.trainer.rollout_seconds = self.trainer.tokens = 0.0
        # here instead of in `on_step_begin`, which is called after the rows have been read
        self._started = self.trainer.clock()


def train(
    case: Case,
    steps: int,
    after: Callable[[StepTimes], None],
    parts: TinyParts | None = None,
    clock: Clock = perf_counter,
) -> None:
    """Take `steps` steps of GRPO; `after` is called with the times of each.

    If `parts` are given, they are trained on their device.
    """
    parts = parts or make_parts(case)
    parts.processor.tokenizer.padding_side = "left"  # TRL requires it for prompts
    if case.freeze_vision:
        parts.network.get_submodule("model.visual").requires_grad_(False)
    timer = StepTimer(after)
    trainer = TimedTrainer(
        model=parts.network,
        reward_funcs=_rewards,
        args=_settings(case, steps, parts),
        train_dataset=_dataset(case, steps),
        processing_class=ImageProcessor(
            parts.processor.image_processor, parts.processor.tokenizer, parts.processor.chat_template
        ),
        callbacks=[timer],
        peft_config=_lora(case),
    )
    trainer.clock = clock
    timer.trainer = trainer
    trainer.train()


def _settings(case: Case, steps: int, parts: TinyParts) -> GRPOConfig:
    rows = case.prompts * case.samples
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=parts.network.device.type == "cpu",
        bf16=parts.network.dtype == torch.bfloat16,
        gradient_checkpointing=False,
        per_device_train_batch_size=case.trl_rows_per_microbatch,
        gradient_accumulation_steps=rows // case.trl_rows_per_microbatch,
        num_generations=case.samples,
        max_completion_length=case.completion_tokens,
        generation_kwargs={"suppress_tokens": _special_ids(parts)},
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        temperature=1.0,
        beta=0.0,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
    )


def _special_ids(parts: TinyParts) -> list[int]:
    """Ids that neither side may sample: special tokens, including the end token, and ids that the tokenizer lacks."""
    embedding = parts.network.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding)
    special = [index for index, token in parts.processor.tokenizer.added_tokens_decoder.items() if token.special]
    return [*special, *range(len(parts.processor.tokenizer), embedding.num_embeddings)]


def _dataset(case: Case, steps: int) -> Dataset:
    tasks = make_tasks(case, case.prompts * steps)
    rows = [
        {"prompt": [{"role": "user", "content": task.question}], "image": Image.fromarray(task.images[0].source)}  # type: ignore[arg-type]
        for task in tasks
    ]
    return Dataset.from_list(rows)


def _lora(case: Case) -> LoraConfig | None:
    if case.lora_rank is None:
        return None
    return LoraConfig(
        r=case.lora_rank, lora_alpha=case.lora_rank, lora_dropout=0.0, target_modules=r".*language_model.*_proj"
    )


def _rewards(completions: list[Any], **_kwargs: Any) -> list[float | None]:
    return [reward_of(turns[0]["content"] if isinstance(turns, list) else turns) for turns in completions]
