"""The settings of each backend alone: rollout engines and trainers. A new one is a section here, in its union."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fovea.config.base import MayChange, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class EmbeddedEngine(Section):
    """Fovea's own engine, in the trainer's process and on its weights, without a copy."""

    name: Literal["embedded"] = "embedded"
    max_batch_tokens: MayChange[PositiveInt] = 65_536
    """Tokens of the key-value cache: prompts once per group, plus max_new_tokens of each running completion."""
    decode_weights: Literal["exact", "int8"] = "exact"
    """Weights of decoding. int8 (CPU): faster, and completions are sampled from slightly other probabilities, so that
    it needs algorithm.importance_sampling_fix."""
    reuse_gib: MayChange[NonNegativeFloat] = 2.0
    """Memory for activations of the rollout that the update reuses (CPU, no gradient_checkpointing); 0: none."""


# one member so far: with a second, `Annotated[EmbeddedEngine | Other, Field(discriminator="name")]`
EngineConfig: TypeAlias = EmbeddedEngine


class TorchBackend(Section):
    """PyTorch on transformers' modules, with Fovea's packed shared-prefix forward."""

    name: Literal["torch"] = "torch"
    logits_mib: MayChange[PositiveFloat] = 512.0
    """Memory for logits that exist at once; longer rows compute them in chunks, and again in the backward pass."""
    liger_kernels: MayChange[bool] = False
    """Liger's Triton kernels for RMS norm, SwiGLU and rotary positions; CUDA only (extra: liger)."""


BackendConfig: TypeAlias = TorchBackend
