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

if TYPE_CHECKING:  # settings are read without importing what they make
    from fovea.rollout.access import EngineAccess
    from fovea.rollout.base import Engine
    from fovea.train.update import PolicyAccess, TrainedPolicy
    from fovea.weights.base import SyncedEngine
    from fovea.weights.sync import NetworkEngine

CPU_KV_CACHE_GIB, CPU_KV_CACHE_TOKENS = 1.0, 32_768
"""Default KV caches of vLLM (GiB) and SGLang (tokens) on a CPU: the trainer needs the machine's memory too."""
DEFAULT_BATCH_TOKENS = 65_536
"""Default size of the embedded engine's KV cache if it does not depend on the free memory of a GPU."""
VLLM_TEMPERATURES = (0.01, 2)
"""Lowest and highest temperature of vLLM, which raises lower ones to the lowest."""
VLLM_MAX_LORA_RANK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """The settings of a run that its engine must support."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    max_prompt_tokens: int
    stop_after_answer: bool
    corrects_for_engine: bool
    """True if the loss corrects for an engine that samples with other probabilities than the trainer's."""
    lora: Lora | None

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest prompt and completion together."""
        return self.max_prompt_tokens + self.max_new_tokens


class EngineSettings(Member):
    """Settings of a rollout engine, which also make the engine."""

    shares_weights: ClassVar[bool] = False
    """True if the engine samples with the trainer's network in this process and holds no weights itself."""
    extra: ClassVar[str | None] = None
    """Extra of Fovea that the engine needs; its package below rollout/ has the same name."""
    forgets_weights: ClassVar[bool] = False
    """True if a restarted engine has lost the weights of earlier syncs, so that each sync must send all of them."""
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
        """True if a weight sync sends adapters separately, instead of merged weights."""
        return False

    @property
    def interpreter(self) -> str | None:
        """Python interpreter of a separate environment for the engine; None for the trainer's environment."""
        return None

    @property
    def lets_segments_grow(self) -> bool:
        """True if the trainer's GPU memory may move: the engine neither opens it by CUDA IPC nor has a pool here."""
        return False

    @property
    def kept_gib(self) -> float:
        """Memory for rollout activations that the update reuses."""
        return 0.0

    @property
    def is_exact(self) -> bool:
        """True if the engine decodes in this process with exactly the trained weights."""
        return False

    def powers(self) -> Iterator[tuple[str, str, str]]:
        """Settings with which the engine sends data or runs code: key below rollout.engine, effect, and alternative."""
        yield from ()


class EmbeddedSettings(EngineSettings):
    """Fovea's own engine, in the trainer's process and on its weights, without a copy."""

    shares_weights = True

    name: Literal["embedded"] = "embedded"
    max_batch_tokens: MayChange[PositiveInt | None] = None
    """Tokens of the KV cache: prompts once per group, and the tokens that running completions have (on CPUs and for
    Qwen3.5: may reach); the states of a Qwen3.5 completion count as the tokens that take as much memory. Default: on a
    GPU four fifths of the memory that is free when a rollout starts, or less, so that it can stay during updates;
    65,536 on CPUs and for Qwen3.5."""
    decode_weights: Literal["exact", "int8"] = "exact"
    """Weights for decoding. int8 (CPU): faster, but with slightly different probabilities; needs
    importance_sampling_fix."""
    reuse_gib: MayChange[NonNegativeFloat] = 2.0
    """Memory for rollout activations that the update reuses: those of a trained vision tower, and on a CPU those of the
    decoder too; only the tower's with train.gradient_checkpointing=full, and none with selective. 0: none."""

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
                "rollout.engine.decode_weights=int8 samples with other probabilities than the trained ones; set "
                "algorithm.importance_sampling_fix=true, or rollout.engine.decode_weights=exact"
            )


class StreamedEngine(EngineSettings):
    """Settings of an engine with its own copy of the weights, which is synced after every update."""

    python: MayChange[str | None] = None
    """Python interpreter of another environment, such as ENV/bin/python, in which the engine (vllm_servers: the client
    of the servers) runs as a separate process. Use it if the trainer's packages conflict with the engine's, as
    Megatron's do. Default: the trainer's environment."""

    @property
    def interpreter(self) -> str | None:
        return self.python

    @abstractmethod
    def make(self, access: EngineAccess) -> SyncedEngine: ...

    def powers(self) -> Iterator[tuple[str, str, str]]:
        if self.python is not None:
            yield "python", f"runs rollout.engine.python={self.python}", "rollout.engine.python=ENV/bin/python"


class ImageLimit(Section):
    """Limits by kind of medium, in vLLM's form."""

    image: PositiveInt = 8
    """Most images in a prompt, including those of later turns."""


class ServingEngine(StreamedEngine):
    """Settings common to vLLM and SGLang."""

    tensor_parallel_size: PositiveInt = 1
    """Number of GPUs that one engine is split over."""
    gpu_memory_utilization: MayChange[Annotated[float, Field(gt=0, lt=1)]] = 0.5
    """Share of a GPU's memory for the engine's weights and KV cache; the trainer needs the rest."""
    max_model_len: PositiveInt | None = None
    """Most tokens of prompt and completion. Default: max_prompt_tokens + max_new_tokens, up to the model's limit."""
    max_num_seqs: MayChange[PositiveInt] = 256
    """Most completions that are decoded at once."""
    max_num_batched_tokens: MayChange[PositiveInt | None] = None
    """Most tokens in one forward pass. Default: the engine's default."""
    enable_chunked_prefill: MayChange[bool] = True
    """Prefill long prompts in chunks while other completions are decoded."""
    enforce_eager: MayChange[bool] = False
    """Use neither CUDA graphs nor compilation: a faster start, but slower decoding."""
    limit_mm_per_prompt: ImageLimit = Field(default_factory=ImageLimit)
    """Limits on the media in one prompt."""
    min_new_tokens: NonNegativeInt = 0
    """Shortest completion, in tokens. Stop tokens are not sampled before that, which the trainer does not account for,
    so algorithm.importance_sampling_fix is needed."""
    engine_args: MayChange[dict[str, Any]] = Field(default_factory=dict)
    """Further arguments of the engine, under the engine's names for them."""

    def powers(self) -> Iterator[tuple[str, str, str]]:
        yield from super().powers()
        if self.engine_args:
            key = "rollout.engine.engine_args"
            yield "engine_args", f"starts its engine with {key}={self.engine_args}", "rollout.engine=embedded"

    def complaints(self, use: EngineUse) -> Iterator[str]:
        if self.min_new_tokens and not use.corrects_for_engine:
            yield (
                f"rollout.engine.min_new_tokens={self.min_new_tokens} samples with other probabilities than the "
                "trained ones; set algorithm.importance_sampling_fix=true, or rollout.engine.min_new_tokens=0"
            )
        if self.min_new_tokens and use.stop_after_answer:
            yield (
                "rollout.stop_after_answer=true ends completions that rollout.engine.min_new_tokens continues; set "
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
    """vLLM in the processes of the run, or in separate ones with `python`; its copy of the weights is synced after
    every update (extra: vllm)."""

    extra = "vllm"

    name: Literal["vllm"] = "vllm"
    kv_cache_gib: MayChange[PositiveFloat | None] = None
    """Memory of the KV cache. Default: what gpu_memory_utilization leaves after the weights; 1 on CPUs."""
    enable_lora: bool = False
    """With model.lora: sync the base weights once and only the adapters after each update; the engine applies them
    separately, as the trainer does. Default: sync all weights after each update, merged, and decode without
    adapters."""

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
                "rollout.engine.enable_lora=true syncs adapters, but the model has none; set model.lora, or "
                "rollout.engine.enable_lora=false"
            )
        elif self.enable_lora and use.lora is not None and use.lora.parts != ("language_model",):
            yield (
                f"model.lora.parts={list(use.lora.parts)} with rollout.engine.enable_lora=true, but vLLM supports "
                "only adapters on the language model; set rollout.engine.enable_lora=false to sync merged weights"
            )
        elif self.enable_lora and use.lora is not None and use.lora.rank > VLLM_MAX_LORA_RANK:
            yield (
                f"model.lora.rank={use.lora.rank} with rollout.engine.enable_lora=true, but vLLM supports ranks up "
                f"to {VLLM_MAX_LORA_RANK}; set rollout.engine.enable_lora=false to sync merged weights"
            )


def _vllm_complaints(name: str, use: EngineUse) -> Iterator[str]:
    for key, value, off in (("top_p", use.top_p, 1), ("top_k", use.top_k, 0), ("min_p", use.min_p, 0)):
        if value != off:
            yield (
                f"rollout.{key}={value} with rollout.engine={name}, whose log-probs are then those of the truncated "
                f"distribution, which is not the trained one; set rollout.{key}={off}, or rollout.engine=embedded"
            )
    lowest, highest = VLLM_TEMPERATURES
    if not lowest <= use.temperature <= highest:
        yield (
            f"rollout.temperature={use.temperature:g} with rollout.engine={name}, which samples between {lowest} and "
            f"{highest}; change it, or set rollout.engine=embedded"
        )


class SglangSettings(ServingEngine):
    """SGLang in separate processes; its copy of the weights is synced after every update (extra: sglang)."""

    extra = "sglang"

    name: Literal["sglang"] = "sglang"
    max_total_tokens: MayChange[PositiveInt | None] = None
    """Tokens of the KV cache. Default: what gpu_memory_utilization leaves; on CPUs 32,768, or twice max_model_len."""
    start_seconds: MayChange[Seconds] = 1800.0
    """Longest time for SGLang to start and to load the model."""
    timeout_seconds: MayChange[Seconds] = 1800.0
    """Longest time without an answer while SGLang has work; after that it is killed and counts as lost."""

    def make(self, access: EngineAccess) -> SyncedEngine:
        from fovea.rollout.sglang.arguments import make_engine

        longest = access.max_model_len
        return make_engine(self, access.model, access.processor, max_model_len=longest, seed=access.seed)

    def complaints(self, use: EngineUse) -> Iterator[str]:
        if use.min_p:
            yield (
                f"rollout.min_p={use.min_p} with rollout.engine=sglang, which cannot sample by seed with min_p; set "
                "rollout.min_p=0, or rollout.engine=embedded"
            )
        yield from super().complaints(use)


ServerUrl: TypeAlias = Annotated[HttpUrl, Field(examples=["http://HOST:PORT"]), Field(pattern=r"^https?://[^/?#@]+$")]


class VllmServersSettings(StreamedEngine):
    """vLLM servers of `fovea serve --for-training`, on any machine; they read weights from a folder (extra: vllm)."""

    extra = "vllm"
    forgets_weights = True
    has_one_leader = True

    name: Literal["vllm_servers"] = "vllm_servers"
    servers: MayChange[tuple[ServerUrl, ...]] = Field(min_length=1)
    """Addresses of the servers: http://HOST:PORT."""
    weights_dir: MayChange[str]
    """Folder that trainer and servers share, private to this user: it holds the weights up to twice, and a key."""
    timeout_seconds: MayChange[Seconds] = 1800.0
    """Time limit of one call, after which another server is called."""
    restart_seconds: MayChange[Seconds] = 900.0
    """Longest time without an answer from any server; a restarted server gets the current weights."""
    limit_mm_per_prompt: ImageLimit = Field(default_factory=ImageLimit)
    """Limits on the media in one prompt."""

    @property
    def lets_segments_grow(self) -> bool:
        # the client then runs in this process and syncs weights by files
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
            yield f"rollout.engine.servers lists {twice} twice; remove one of them"


EngineConfig: TypeAlias = Annotated[
    EmbeddedSettings | VllmSettings | VllmServersSettings | SglangSettings | StreamedEngine,
    OpenUnion("fovea.engines", "make"),
]


class TorchBackend(Section):
    """PyTorch with transformers' modules and Fovea's packed shared-prefix forward."""

    shares_network: ClassVar[bool] = True
    """True if an engine that shares weights can sample with the trained network."""

    name: Literal["torch"] = "torch"
    logits_mib: MayChange[PositiveFloat] = 512.0
    """Memory for the logits that exist at once; longer rows compute them in chunks. The backward pass computes them
    again if an importance ratio covers a whole completion (gspo off-policy, sequence weights on-policy)."""
    liger_kernels: MayChange[bool | Literal["auto"]] = "auto"
    """Liger's kernels for RMS norm, SwiGLU and rotary positions, on CUDA (extra: liger). auto: if installed."""
    replicas: MayChange[PositiveInt] = 1
    """Number of groups of ranks that each hold all weights, sharded within the group (hybrid sharding). With one group
    per machine, weights are gathered within a machine, and only summed gradients cross the network."""
    cpu_offload: MayChange[bool] = False
    """Keep the float32 weights and the optimizer's states in host memory; with several ranks, passes also gather their
    weights from there. CUDA only; the transfers make every step slower."""

    def make(self, access: PolicyAccess) -> TrainedPolicy:
        """Make the policy."""
        from fovea.train.torch.policy import make_policy

        assert access.network is not None, "the torch backend trains a network in place"
        return make_policy(access.config, access.network, access.tape, access.ranks)


class MegatronBackend(Section):
    """Megatron-core, with models by Megatron's bridge: tensors and layers split over GPUs (extra: megatron)."""

    shares_network: ClassVar[bool] = False

    name: Literal["megatron"] = "megatron"
    tensor_parallel_size: PositiveInt = 1
    """Number of GPUs that each layer is split over; at most those of one machine."""
    sequence_parallel: bool = False
    """Also divide tokens among those GPUs where layers are not split (norms, residual stream), to save memory."""
    pipeline_parallel_size: PositiveInt = 1
    """Number of stages that the layers are divided into, each on separate GPUs."""
    expert_parallel_size: PositiveInt = 1
    """Number of GPUs that the experts of a layer are divided among; tokens are sent to their experts and back."""
    optimizer_offload: MayChange[bool] = False
    """Keep the optimizer's float32 weights and moments in host memory between steps, each of which copies them."""
    logits_mib: MayChange[PositiveFloat] = 512.0
    """Memory for the logits that exist at once; longer rows compute them in chunks. The backward pass computes them
    again if an importance ratio covers a whole completion (gspo off-policy, sequence weights on-policy)."""

    # settings that only the torch backend has
    replicas: ClassVar[int] = 1
    cpu_offload: ClassVar[bool] = False
    liger_kernels: ClassVar[bool] = False

    def make(self, access: PolicyAccess) -> TrainedPolicy:
        """Make this process's part of the policy; all training processes must call it together."""
        # an optional extra; the module reports its absence
        from fovea.train.megatron.policy import MegatronPolicy

        return MegatronPolicy(access.config, access.model, access.banned_ids)


BackendConfig: TypeAlias = Annotated[TorchBackend | MegatronBackend, Field(discriminator="name")]
