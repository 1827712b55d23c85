"""What draws completions, and its memory for what an update can take over."""

from __future__ import annotations

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

MIN_RECORDED_WIDTH = 128
"""Of narrower models a linear layer's output is computed faster than it is read from memory."""


def make_engine(
    config: Config, processor: Processor, vlm: PolicyNetwork, tape: Tape | None = None
) -> EmbeddedEngine | PlainEngine:
    """The embedded engine, drawing with the network of a policy in this process."""
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
    """Memory for what the update can take over from the rollout; None where it is not wanted.

    Of the vision tower alone where linear outputs do not pay, or are not those that the update computes.
    """
    device, settings = next(vlm.parameters()).device, config.rollout.engine
    if not isinstance(vlm, VLM):
        return None
    if settings.reuse_gib == 0 or config.train.gradient_checkpointing or device.type != "cpu":
        return None
    narrow = vlm.text_config.hidden_size < MIN_RECORDED_WIDTH
    inexact = settings.decode_weights != "exact"
    padded = not config.train.variable_seq_lengths
    # in 16 bits the later steps of an update would be compared with another computation of the first
    algorithm = config.algorithm
    critic = algorithm.critic
    scored = algorithm.needs_old_logprobs or (critic is not None and critic.trunk != "separate")
    again = algorithm.ppo_epochs * algorithm.minibatches > 1 or scored
    mixed = vlm.dtype != torch.float32 and again
    return Tape(
        [] if narrow or inexact or padded or mixed else vlm.linear_widths, settings.reuse_gib * 2**30, vlm.dtype
    )


def make_evaluator(config: Config, engine: Engine, environment: Environment, grading: Grading) -> Evaluator:
    """The evaluator of held-out rows."""
    return Evaluator(
        engine,
        environment,
        grading,
        max_new_tokens=config.rollout.max_new_tokens,
        stop=config.rollout.stop,
        batch_size=config.evaluate.batch_size,
    )
