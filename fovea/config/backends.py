"""The settings of each backend alone: rollout engines and trainers. A new one is a section here, in its union."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from fovea.config.base import HttpUrl, MayChange, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from fovea.config.type_text import Example

CPU_KV_CACHE_GIB, CPU_KV_CACHE_TOKENS = 1.0, 32_768
"""KV caches of vLLM and SGLang on a CPU where nothing is set: they would take a share of the machine's memory, which
the trainer needs too."""


DEFAULT_BATCH_TOKENS = 65_536
"""Tokens of the embedded engine's KV cache where nothing is set and no pool is sized by a GPU's free memory."""


class EmbeddedEngine(Section):
    """Fovea's own engine, in the trainer's process and on its weights, without a copy."""

    name: Literal["embedded"] = "embedded"
    max_batch_tokens: MayChange[PositiveInt | None] = None
    """Tokens of the KV cache: prompts once per group, and what running completions have drawn (on CPUs: may draw).
    Default: on a GPU four fifths of the memory that is free when a rollout starts, or less, so that it can stay during
    updates; 65,536 on CPUs."""
    decode_weights: Literal["exact", "int8"] = "exact"
    """Weights of decoding. int8 (CPU): faster, and completions are sampled from slightly other probabilities, so that
    it needs algorithm.importance_sampling_fix."""
    reuse_gib: MayChange[NonNegativeFloat] = 2.0
    """Memory for activations of the rollout that the update reuses; 0: none. Of a trained vision tower, and on a CPU of
    the decoder too; with train.gradient_checkpointing=full of the tower alone, with selective of neither."""


class ImageLimit(Section):
    """Limits by kind of medium, as vLLM writes them."""

    image: PositiveInt = 8
    """Most images of a prompt, those of later turns included."""


class ServingEngine(Section):
    """What engines made for serving have in common; they draw with weights of their own."""

    name: str
    python: MayChange[str | None] = None
    """Interpreter of another Python environment, such as ENV/bin/python, in which the engine gets a process: for a
    trainer whose packages do not go with the engine's, as Megatron's. Default: the trainer's own."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that one engine is spread over."""
    gpu_memory_utilization: MayChange[Annotated[float, Field(gt=0, lt=1)]] = 0.5
    """Share of a GPU for weights and KV cache of the engine; the trainer needs the rest."""
    max_model_len: PositiveInt | None = None
    """Most tokens of a prompt with its completion. Default: data.max_prompt_tokens + rollout.max_new_tokens, at most
    the positions of the model."""
    max_num_seqs: MayChange[PositiveInt] = 256
    """Most completions that decode at once."""
    max_num_batched_tokens: MayChange[PositiveInt | None] = None
    """Most tokens of one forward pass. Default: the engine's own."""
    enable_chunked_prefill: MayChange[bool] = True
    """Prefill of long prompts in chunks, beside the decoding of others."""
    enforce_eager: MayChange[bool] = False
    """Neither CUDA graphs nor compilation: a faster start, slower decoding."""
    limit_mm_per_prompt: ImageLimit = Field(default_factory=ImageLimit)
    """Media of one prompt."""
    min_new_tokens: NonNegativeInt = 0
    """Shortest completion, in tokens; until then stop tokens are not drawn, which the trainer does not know of, so that
    it needs algorithm.importance_sampling_fix."""
    ignore_eos: bool = False
    """Continue past stop tokens up to max_new_tokens; for measurements of speed."""
    engine_args: MayChange[dict[str, Any]] = Field(default_factory=dict)
    """Further arguments of the engine, under its own names."""


class VllmEngine(ServingEngine):
    """vLLM in the processes of the run, or with `python` beside them, on weights of its own that every update is pushed
    to (extra: vllm)."""

    name: Literal["vllm"] = "vllm"
    kv_cache_gib: MayChange[PositiveFloat | None] = None
    """Memory of the KV cache. Default: what gpu_memory_utilization leaves beside the weights; 1 on CPUs."""
    enable_lora: bool = False
    """With model.lora: base weights are pushed once and adapters alone after each update, which the engine applies
    beside them, as the trainer does. Default: merged weights, all of them each time; decoding is then that of a model
    without adapters."""


class SglangEngine(ServingEngine):
    """SGLang in processes of its own, on weights of its own that every update is pushed to (extra: sglang)."""

    name: Literal["sglang"] = "sglang"
    max_total_tokens: MayChange[PositiveInt | None] = None
    """Tokens of the KV cache. Default: what gpu_memory_utilization leaves beside the weights; 32,768 on CPUs, and at
    least twice max_model_len."""
    start_seconds: MayChange[PositiveFloat] = 1800.0
    """Longest time for SGLang to start and to load the model."""
    timeout_seconds: MayChange[PositiveFloat] = 1800.0
    """Longest time without an answer while SGLang has something to do; it is ended then, and counts as lost."""


ServerUrl: TypeAlias = Annotated[HttpUrl, Example("http://HOST:PORT"), Field(pattern=r"^https?://[^/?#@]+$")]


class VllmServersEngine(Section):
    """vLLM servers of `fovea serve --for-training`, on this machine or others; a folder brings them the weights
    (extra: vllm)."""

    name: Literal["vllm_servers"] = "vllm_servers"
    python: MayChange[str | None] = None
    """Interpreter of another Python environment with vLLM, such as ENV/bin/python, in which a process talks to the
    servers: for a trainer whose packages do not go with vLLM's, as Megatron's. Default: the trainer's own."""
    servers: MayChange[tuple[ServerUrl, ...]] = Field(min_length=1)
    """Their addresses: http://HOST:PORT."""
    weights_dir: MayChange[str]
    """Folder that the trainer and all servers see, on shared storage; room for the weights twice. It also holds the
    key of the servers, for this user only."""
    max_concurrency: MayChange[PositiveInt] = 256
    """Most requests of one server at once."""
    timeout_seconds: MayChange[PositiveFloat] = 1800.0
    """Time limit of one call, after which it is made of another server."""
    restart_seconds: MayChange[PositiveFloat] = 900.0
    """Longest time for which no server may answer, at the start or later; one that is started again gets the present
    weights."""
    limit_mm_per_prompt: ImageLimit = Field(default_factory=ImageLimit)
    """Media of one prompt."""


EngineConfig: TypeAlias = Annotated[
    EmbeddedEngine | VllmEngine | VllmServersEngine | SglangEngine, Field(discriminator="name")
]


class TorchBackend(Section):
    """PyTorch on transformers' modules, with Fovea's packed shared-prefix forward."""

    name: Literal["torch"] = "torch"
    logits_mib: MayChange[PositiveFloat] = 512.0
    """Memory for logits that exist at once; longer rows compute them in chunks, and where one importance ratio is of a
    whole completion (gspo off-policy, weights by completion on-policy) again in the backward pass."""
    liger_kernels: MayChange[bool | Literal["auto"]] = "auto"
    """Liger's Triton kernels for RMS norm, SwiGLU and rotary positions; CUDA only (extra: liger). auto: on CUDA, where
    they are installed."""
    replicas: MayChange[PositiveInt] = 1
    """Groups of ranks that hold all weights each, sharded inside the group (hybrid sharding): with as many as there are
    machines, weights are gathered inside a machine, and only summed gradients cross the network."""
    cpu_offload: MayChange[bool] = False
    """Keep the float32 weights and the optimizer's states in the host's memory; with several ranks the weights that
    passes gather come from there too. CUDA only; slower by the transfers, which every step makes."""


class MegatronBackend(Section):
    """Megatron-core, with models by Megatron's bridge: tensors and layers split over GPUs (extra: megatron)."""

    name: Literal["megatron"] = "megatron"
    tensor_parallel_size: PositiveInt = 1
    """GPUs that each layer is split over; at most those of one machine."""
    sequence_parallel: bool = False
    """Divide the tokens between those GPUs where a layer is not split (norms, residual stream): less memory for
    activations."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages that the layers are divided into, on GPUs of their own."""
    expert_parallel_size: PositiveInt = 1
    """GPUs that the experts of a layer are dealt to, whole; their tokens travel to them and back."""
    optimizer_offload: MayChange[bool] = False
    """Keep the optimizer's float32 weights and moments in the host's memory between its steps; each step takes the time
    of copying them to the GPU and back."""
    logits_mib: MayChange[PositiveFloat] = 512.0
    """Memory for logits that exist at once; longer rows compute them in chunks, and where one importance ratio is of a
    whole completion (gspo off-policy, weights by completion on-policy) again in the backward pass."""

    @property
    def replicas(self) -> int:
        """One: no ranks hold all weights by themselves."""
        return 1

    @property
    def cpu_offload(self) -> bool:
        """False: weights and optimizer stay on the device."""
        return False

    @property
    def liger_kernels(self) -> bool:
        """False: Megatron has kernels of its own."""
        return False


BackendConfig: TypeAlias = Annotated[TorchBackend | MegatronBackend, Field(discriminator="name")]
