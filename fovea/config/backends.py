"""The settings of each backend: rollout engines, with the checks of their settings, and trainers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from fovea.config.model import Lora
from fovea_gym.settings.base import (
    HttpUrl,
    MayChange,
    Member,
    NonNegativeFloat,
    NonNegativeInt,
    OpenUnion,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)

if TYPE_CHECKING:  # settings are read without what they make
    from fovea.rollout.access import EngineAccess
    from fovea.rollout.base import Engine
    from fovea.train.update import PolicyAccess, TrainedPolicy
    from fovea.weights.base import SyncedEngine
    from fovea.weights.sync import NetworkEngine

CPU_KV_CACHE_GIB, CPU_KV_CACHE_TOKENS = 1.0, 32_768
"""KV caches of vLLM and SGLang on a CPU where nothing is set: the trainer needs the machine's memory too."""
DEFAULT_BATCH_TOKENS = 65_536
"""Tokens of the embedded engine's KV cache where nothing is set and no pool is sized by a GPU's free memory."""
VLLM_TEMPERATURES = (0.01, 2)
"""Lowest and highest temperature of vLLM, which raises a lower one to the first."""
VLLM_MAX_LORA_RANK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """The settings of a run that its engine has to go with, under their own names."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    max_prompt_tokens: int
    stop_after_answer: bool
    corrects_for_engine: bool
    """True if the loss accounts for an engine that draws from other probabilities than the trainer's."""
    lora: Lora | None

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return self.max_prompt_tokens + self.max_new_tokens


class EngineSettings(Member):
    """Settings of a rollout engine, which make it."""

    shares_weights: ClassVar[bool] = False
    """True if the engine samples with a network of Fovea's in this process, and holds no weights itself."""
    extra: ClassVar[str | None] = None
    """Extra of Fovea's that the engine needs; the package below rollout/ has its name."""
    forgets_weights: ClassVar[bool] = False
    """True if an engine that is started again has lost what earlier weight syncs brought, so that each brings all."""
    has_one_leader: ClassVar[bool] = False
    """True if one worker leads all engines, which run elsewhere."""

    @abstractmethod
    def make(self, access: EngineAccess) -> Engine:
        """Make the engine."""

    def complaints(self, use: EngineUse) -> Iterator[str]:
        """Yield an error text for each setting that this engine cannot work with."""
        yield from ()

    @property
    def takes_adapters(self) -> bool:
        """True if a weight sync brings adapters beside the weights that they add to, instead of merged weights."""
        return False

    @property
    def interpreter(self) -> str | None:
        """Interpreter of another Python environment for the engine; None for the trainer's."""
        return None

    @property
    def lets_segments_grow(self) -> bool:
        """True if the trainer's GPU memory may move: the engine neither opens it by CUDA IPC nor has a pool here."""
        return False

    @property
    def kept_gib(self) -> float:
        """Memory for activations of the rollout that the update reuses."""
        return 0.0

    @property
    def is_exact(self) -> bool:
        """True if it decodes in this process with the very weights that are trained."""
        return False

    def powers(self) -> Iterator[tuple[str, str, str]]:
        """Settings by which it sends data or runs code: key below rollout.engine, effect, and what to set instead."""
        yield from ()


class EmbeddedSettings(EngineSettings):
    """Fovea's own engine, in the trainer's process and on its weights, without a copy."""

    shares_weights = True

    name: Literal["embedded"] = "embedded"
    max_batch_tokens: MayChange[PositiveInt | None] = None
    """Tokens of the KV cache: prompts once per group, and what running completions have drawn (on CPUs and for Qwen3.5:
    may draw); the states of a completion of Qwen3.5 count as the tokens that take as much memory. Default: on a GPU
    four fifths of the memory that is free when a rollout starts, or less, so that it can stay during updates; 65,536 on
    CPUs and for Qwen3.5."""
    decode_weights: Literal["exact", "int8"] = "exact"
    """Weights of decoding. int8 (CPU): faster, from slightly other probabilities; needs importance_sampling_fix."""
    reuse_gib: MayChange[NonNegativeFloat] = 2.0
    """Memory for activations of the rollout that the update reuses; 0: none. Of a trained vision tower, and on a CPU of
    the decoder too; with train.gradient_checkpointing=full of the tower only, with selective of neither."""

    @property
    def takes_adapters(self) -> bool:
        return True

    @property
    def lets_segments_grow(self) -> bool:
        return True

    @property
    def kept_gib(self) -> float:
        return self.reuse_gib

    @property
    def is_exact(self) -> bool:
        return self.decode_weights == "exact"

    def make(self, access: EngineAccess) -> NetworkEngine:
        from fovea.rollout.embedded.arguments import make_engine

        assert access.network is not None, "the embedded engine samples with a network"
        return make_engine(
            self,
            access.processor,
            access.network,
            tape=access.tape,
            synced=access.synced,
            can_free_memory=access.can_free_memory,
        )

    def complaints(self, use: EngineUse) -> Iterator[str]:
        if self.decode_weights == "int8" and not use.corrects_for_engine:
            yield (
                "rollout.engine.decode_weights=int8 draws from other probabilities than those that are trained; set "
                "algorithm.importance_sampling_fix=true, or rollout.engine.decode_weights=exact"
            )


class StreamedEngine(EngineSettings):
    """Settings of an engine with its own copy of the weights, to which every update is sent."""

    python: MayChange[str | None] = None
    """Interpreter of another Python environment, such as ENV/bin/python, in which the engine (vllm_servers: what talks
    to the servers) gets a process: for a trainer whose packages conflict, as Megatron's do. Default: the trainer's."""

    @property
    def interpreter(self) -> str | None:
        return self.python

    @abstractmethod
    def make(self, access: EngineAccess) -> SyncedEngine: ...

    def powers(self) -> Iterator[tuple[str, str, str]]:
        if self.python is not None:
            yield "python", f"runs rollout.engine.python={self.python}", "rollout.engine.python=ENV/bin/python"


class ImageLimit(Section):
    """Limits by kind of medium, as vLLM writes them."""

    image: PositiveInt = 8
    """Most images of a prompt, those of later turns included."""


class ServingEngine(StreamedEngine):
    """Settings common to vLLM and SGLang."""

    tensor_parallel_size: PositiveInt = 1
    """GPUs that one engine is spread over."""
    gpu_memory_utilization: MayChange[Annotated[float, Field(gt=0, lt=1)]] = 0.5
    """Share of a GPU for weights and KV cache of the engine; the trainer needs the rest."""
    max_model_len: PositiveInt | None = None
    """Most tokens of prompt and completion. Default: max_prompt_tokens + max_new_tokens, at most the positions."""
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
    engine_args: MayChange[dict[str, Any]] = Field(default_factory=dict)
    """Further arguments of the engine, under its own names."""

    def powers(self) -> Iterator[tuple[str, str, str]]:
        yield from super().powers()
        if self.engine_args:
            key = "rollout.engine.engine_args"
            yield "engine_args", f"starts its engine with {key}={self.engine_args}", "rollout.engine=embedded"

    def complaints(self, use: EngineUse) -> Iterator[str]:
        if self.min_new_tokens and not use.corrects_for_engine:
            yield (
                f"rollout.engine.min_new_tokens={self.min_new_tokens} draws from other probabilities than those that "
                "are trained; set algorithm.importance_sampling_fix=true, or rollout.engine.min_new_tokens=0"
            )
        if self.min_new_tokens and use.stop_after_answer:
            yield (
                "rollout.stop_after_answer=true ends completions that rollout.engine.min_new_tokens makes go on; set "
                "rollout.engine.min_new_tokens=0"
            )
        if self.min_new_tokens > use.max_new_tokens:
            yield (
                f"rollout.engine.min_new_tokens={self.min_new_tokens} is more than rollout.max_new_tokens="
                f"{use.max_new_tokens}; lower it"
            )
        if self.max_model_len is not None and self.max_model_len < use.max_tokens:
            yield (
                f"rollout.engine.max_model_len={self.max_model_len} is less than data.max_prompt_tokens="
                f"{use.max_prompt_tokens} and rollout.max_new_tokens={use.max_new_tokens} together; raise it to "
                f"{use.max_tokens}, or lower those"
            )


class VllmSettings(ServingEngine):
    """vLLM in the processes of the run, or with `python` beside them, on its own weights that every update is sent
    to (extra: vllm)."""

    extra = "vllm"

    name: Literal["vllm"] = "vllm"
    kv_cache_gib: MayChange[PositiveFloat | None] = None
    """Memory of the KV cache. Default: what gpu_memory_utilization leaves beside the weights; 1 on CPUs."""
    enable_lora: bool = False
    """With model.lora: base weights are sent once and only adapters after each update, which the engine applies
    beside them, as the trainer does. Default: merged weights, all of them each time; decoding is then that of a model
    without adapters."""

    @property
    def takes_adapters(self) -> bool:
        return self.enable_lora

    def make(self, access: EngineAccess) -> SyncedEngine:
        from fovea.rollout.vllm.arguments import make_engine

        longest = access.max_model_len
        return make_engine(self, access.model, access.processor, max_model_len=longest, seed=access.seed)

    def complaints(self, use: EngineUse) -> Iterator[str]:
        yield from _vllm_complaints(self.name, use)
        yield from super().complaints(use)
        if self.enable_lora and use.lora is None:
            yield (
                "rollout.engine.enable_lora=true syncs adapters, but the model is trained without; set model.lora, or "
                "rollout.engine.enable_lora=false"
            )
        elif self.enable_lora and use.lora is not None and use.lora.parts != ("language_model",):
            yield (
                f"model.lora.parts={list(use.lora.parts)} with rollout.engine.enable_lora=true, and vLLM takes "
                "adapters on the language model; set rollout.engine.enable_lora=false, and it gets merged weights"
            )
        elif self.enable_lora and use.lora is not None and use.lora.rank > VLLM_MAX_LORA_RANK:
            yield (
                f"model.lora.rank={use.lora.rank} with rollout.engine.enable_lora=true, and vLLM takes adapters of up "
                f"to {VLLM_MAX_LORA_RANK}; set rollout.engine.enable_lora=false, and it gets merged weights"
            )


def _vllm_complaints(name: str, use: EngineUse) -> Iterator[str]:
    for key, value, off in (("top_p", use.top_p, 1), ("top_k", use.top_k, 0), ("min_p", use.min_p, 0)):
        if value != off:
            yield (
                f"rollout.{key}={value} with rollout.engine={name}, whose log-probs are then of what it leaves, and "
                f"not of what is trained; set rollout.{key}={off}, or rollout.engine=embedded"
            )
    lowest, highest = VLLM_TEMPERATURES
    if not lowest <= use.temperature <= highest:
        yield (
            f"rollout.temperature={use.temperature:g} with rollout.engine={name}, which samples between {lowest} and "
            f"{highest}; change it, or set rollout.engine=embedded"
        )


class SglangSettings(ServingEngine):
    """SGLang in its own processes, on its own weights that every update is sent to (extra: sglang)."""

    extra = "sglang"

    name: Literal["sglang"] = "sglang"
    max_total_tokens: MayChange[PositiveInt | None] = None
    """Tokens of the KV cache. Default: what gpu_memory_utilization leaves; on CPUs 32,768, or twice max_model_len."""
    start_seconds: MayChange[Seconds] = 1800.0
    """Longest time for SGLang to start and to load the model."""
    timeout_seconds: MayChange[Seconds] = 1800.0
    """Longest time without an answer while SGLang has something to do; it is ended then, and counts as lost."""

    def make(self, access: EngineAccess) -> SyncedEngine:
        from fovea.rollout.sglang.arguments import make_engine

        longest = access.max_model_len
        return make_engine(self, access.model, access.processor, max_model_len=longest, seed=access.seed)

    def complaints(self, use: EngineUse) -> Iterator[str]:
        if use.min_p:
            yield (
                f"rollout.min_p={use.min_p} with rollout.engine=sglang, which cannot draw by seed with it; set "
                "rollout.min_p=0, or rollout.engine=embedded"
            )
        yield from super().complaints(use)


ServerUrl: TypeAlias = Annotated[HttpUrl, Field(examples=["http://HOST:PORT"]), Field(pattern=r"^https?://[^/?#@]+$")]


class VllmServersSettings(StreamedEngine):
    """vLLM servers of `fovea serve --for-training`, on any machine; a folder brings them the weights (extra: vllm)."""

    extra = "vllm"
    forgets_weights = True
    has_one_leader = True

    name: Literal["vllm_servers"] = "vllm_servers"
    servers: MayChange[tuple[ServerUrl, ...]] = Field(min_length=1)
    """Their addresses: http://HOST:PORT."""
    weights_dir: MayChange[str]
    """Folder that trainer and servers share: room for the weights twice, and the servers' key, for this user only."""
    timeout_seconds: MayChange[Seconds] = 1800.0
    """Time limit of one call, after which it is made of another server."""
    restart_seconds: MayChange[Seconds] = 900.0
    """Longest time for which no server may answer; one that is started again gets the present weights."""
    limit_mm_per_prompt: ImageLimit = Field(default_factory=ImageLimit)
    """Media of one prompt."""

    @property
    def lets_segments_grow(self) -> bool:
        # in this process, which syncs by files
        return self.python is None

    def make(self, access: EngineAccess) -> SyncedEngine:
        from fovea.rollout.vllm.connect import connect

        return connect(self, access.model, access.processor, max_model_len=access.max_model_len)

    def powers(self) -> Iterator[tuple[str, str, str]]:
        sent = "rows, weights and the key in rollout.engine.weights_dir"
        key = "rollout.engine.servers"
        yield "servers", f"sends {sent} to {key}={list(self.servers)}", f"{key}=[URL]"
        yield from super().powers()

    def complaints(self, use: EngineUse) -> Iterator[str]:
        yield from _vllm_complaints(self.name, use)
        twice = next((each for each in self.servers if self.servers.count(each) > 1), None)
        if twice is not None:
            yield f"rollout.engine.servers names {twice} twice, which is not a second server; leave one out"


EngineConfig: TypeAlias = Annotated[
    EmbeddedSettings | VllmSettings | VllmServersSettings | SglangSettings | StreamedEngine,
    OpenUnion("fovea.engines", "make"),
]


class TorchBackend(Section):
    """PyTorch on transformers' modules, with Fovea's packed shared-prefix forward."""

    shares_network: ClassVar[bool] = True
    """True if the trained network is one that an engine which shares weights can sample with."""

    name: Literal["torch"] = "torch"
    logits_mib: MayChange[PositiveFloat] = 512.0
    """Memory for logits that exist at once; longer rows compute them in chunks, and where one importance ratio is of a
    whole completion (gspo off-policy, weights by completion on-policy) again in the backward pass."""
    liger_kernels: MayChange[bool | Literal["auto"]] = "auto"
    """Liger's kernels for RMS norm, SwiGLU and rotary positions, on CUDA (extra: liger). auto: where installed."""
    replicas: MayChange[PositiveInt] = 1
    """Groups of ranks that hold all weights each, sharded inside the group (hybrid sharding): with as many as there are
    machines, weights are gathered inside a machine, and only summed gradients cross the network."""
    cpu_offload: MayChange[bool] = False
    """Keep the float32 weights and the optimizer's states in the host's memory; with several ranks the weights that
    passes gather come from there too. CUDA only; slower by the transfers, which every step makes."""

    def make(self, access: PolicyAccess) -> TrainedPolicy:
        """Make the policy."""
        from fovea.train.torch.policy import make_policy

        assert access.network is not None, "it trains a network in place"
        return make_policy(access.config, access.network, access.tape, access.ranks)


class MegatronBackend(Section):
    """Megatron-core, with models by Megatron's bridge: tensors and layers split over GPUs (extra: megatron)."""

    shares_network: ClassVar[bool] = False

    name: Literal["megatron"] = "megatron"
    tensor_parallel_size: PositiveInt = 1
    """GPUs that each layer is split over; at most those of one machine."""
    sequence_parallel: bool = False
    """Divide tokens between those GPUs where a layer is not split (norms, residual stream): fewer activations."""
    pipeline_parallel_size: PositiveInt = 1
    """Stages that the layers are divided into, each on separate GPUs."""
    expert_parallel_size: PositiveInt = 1
    """GPUs that the experts of a layer are dealt to, whole; their tokens travel to them and back."""
    optimizer_offload: MayChange[bool] = False
    """Keep the optimizer's float32 weights and moments in the host's memory between its steps, which then copy them."""
    logits_mib: MayChange[PositiveFloat] = 512.0
    """Memory for logits that exist at once; longer rows compute them in chunks, and where one importance ratio is of a
    whole completion (gspo off-policy, weights by completion on-policy) again in the backward pass."""

    # settings of the other backend
    replicas: ClassVar[int] = 1
    cpu_offload: ClassVar[bool] = False
    liger_kernels: ClassVar[bool] = False

    def make(self, access: PolicyAccess) -> TrainedPolicy:
        """Make this process's part of the policy, which all processes that train do together."""
        # an optional extra; the module reports its absence
        from fovea.train.megatron.policy import MegatronPolicy

        return MegatronPolicy(access.config, access.model, access.banned_ids)


BackendConfig: TypeAlias = Annotated[TorchBackend | MegatronBackend, Field(discriminator="name")]
