"""Builders of the rollout engine, its activation tape, and the evaluator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fovea.config.run import Config
from fovea.environments.base import Environment
from fovea.environments.graders.grading import Grading
from fovea.errors import ConfigError
from fovea.evaluation.evaluator import Evaluator
from fovea.models.activation_tape import Tape
from fovea.models.policy_network import PolicyNetwork
from fovea.models.processor import Processor
from fovea.models.vlm import VLM
from fovea.rollout.base import Engine
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.plain import PlainEngine
from fovea.rollout.embedded.tuning import Tuning
from fovea.types import Sampling

MIN_RECORDED_WIDTH = 128
"""Smallest width that is recorded: narrower layers are recomputed faster than their outputs are read from memory."""


def make_engine(
    config: Config, processor: Processor, vlm: PolicyNetwork, tape: Tape | None = None
) -> EmbeddedEngine | PlainEngine:
    """Make the engine that samples with the policy's network in this process: embedded, else plain."""
    settings = config.rollout.engine
    int8 = settings.decode_weights == "int8"
    device = next(vlm.parameters()).device
    if int8 and device.type != "cpu":
        raise ConfigError(
            f"rollout.engine.decode_weights=int8, but the model is on {device.type} and 8-bit decoding is made for "
            "CPUs; set rollout.engine.decode_weights=exact"
        )
    if not isinstance(vlm, VLM):
        if int8:
            raise ConfigError(
                "rollout.engine.decode_weights=int8, but the engine runs transformers' own forward (model.fast_path); "
                "set rollout.engine.decode_weights=exact"
            )
        return PlainEngine(vlm, processor, max_batch_tokens=settings.max_batch_tokens)
    return EmbeddedEngine(
        vlm,
        processor,
        max_batch_tokens=settings.max_batch_tokens,
        tape=tape,
        tuning=Tuning(int8_decoding=int8),
    )


def make_tape(config: Config, vlm: PolicyNetwork) -> Tape | None:
    """Make the tape that records activations of the rollout for its update; None where the update reuses none.

    It records the vision graph alone where linear outputs do not pay, or differ from those of the update.
    """
    device, settings = next(vlm.parameters()).device, config.rollout.engine
    if not isinstance(vlm, VLM):
        return None
    # outputs of a rollout are without dropout
    off = settings.reuse_gib == 0 or config.train.gradient_checkpointing or config.model.has_dropout
    if off or device.type != "cpu":
        return None
    narrow = vlm.text_config.hidden_size < MIN_RECORDED_WIDTH
    inexact = settings.decode_weights != "exact"
    padded = not config.train.variable_seq_lengths
    # in 16 bits, recorded outputs round differently from those that later passes over the same samples compute, and the
    # importance ratios would contain that difference
    algorithm = config.algorithm
    critic = algorithm.critic
    scored = algorithm.needs_old_logprobs or (critic is not None and critic.trunk != "separate")
    again = algorithm.ppo_epochs * algorithm.minibatches > 1 or scored
    mixed = vlm.dtype != torch.float32 and again
    return Tape(
        [] if narrow or inexact or padded or mixed else vlm.linear_widths, settings.reuse_gib * 2**30, vlm.dtype
    )


def make_evaluator(
    config: Config,
    engine: Engine,
    environment: Environment,
    grading: Grading,
    note_unscored: Callable[[str], None] = lambda _: None,
) -> Evaluator:
    """Make the evaluator of held-out rows; `note_unscored` is told why a row has no score."""
    return Evaluator(
        engine,
        environment,
        grading,
        greedy=Sampling(max_new_tokens=config.rollout.max_new_tokens, temperature=0.0, stop=config.rollout.stop),
        batch_size=config.evaluate.batch_size,
        image_type_key=config.evaluate.image_type_key,
        note_unscored=note_unscored,
    )
