"""Settings of the model: which model it is, and which of its parts are trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fovea_gym.settings.base import MayChange, NonNegativeFloat, PositiveInt, Section, Tree

Family: TypeAlias = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
LoraPart: TypeAlias = Literal["language_model", "vision_tower", "projector"]
ALL_LINEAR = "all-linear"


class TinyModel(Section):
    """A small Qwen-VL with random weights, made from transformers' classes, that learns on a laptop."""

    family: Family = "qwen3_vl"
    """Architecture."""
    hidden_size: Annotated[int, Field(ge=1, le=1 << 14)] = 64
    """Width of the language model."""
    num_layers: Annotated[int, Field(ge=1, le=1000)] = 3
    """Decoder layers."""
    num_heads: Annotated[int, Field(ge=1, le=1 << 11)] = 2
    """Query heads; they divide hidden_size, and the width of a head must be a multiple of 8."""
    num_kv_heads: Annotated[int, Field(ge=1, le=1 << 11)] = 1
    """Key and value heads."""
    intermediate_size: Annotated[int, Field(ge=1, le=1 << 16)] = 128
    """Width of the MLP, and of every expert of qwen3_vl_moe and qwen3_5_moe."""
    image_side_px: Annotated[int, Field(ge=16, le=8192)] = 48
    """Side of the image for which the learned position grid is made (not in qwen2_vl, qwen2_5_vl)."""
    vocabulary_size: Annotated[int, Field(ge=300, le=1 << 20)] = 512
    """Entries of the tokenizer, which is trained on the task's texts; includes 256 bytes and Qwen's special tokens."""

    def contradictions(self) -> Iterator[str]:
        if self.hidden_size % (8 * self.num_heads):
            yield (
                f"model.tiny: hidden_size={self.hidden_size} is not a multiple of 8 * num_heads={8 * self.num_heads}; "
                f"set hidden_size={(self.hidden_size // (8 * self.num_heads) + 1) * 8 * self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            yield (
                f"model.tiny: num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "set num_kv_heads=1"
            )
        if self.family == "qwen3_vl_moe" and self.hidden_size in (self.intermediate_size, 2 * self.intermediate_size):
            yield (
                f"model.tiny: experts with hidden_size={self.hidden_size} and intermediate_size="
                f"{self.intermediate_size} are square, and transformers cannot tell the order of their axes in a file; "
                f"set intermediate_size={self.intermediate_size + 8}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads


class Lora(Section):
    """Low-rank adapters on linear layers, by peft."""

    short_lists = ("parts", "targets", "exclude")

    rank: Annotated[int, Field(ge=1, le=1 << 13)] = 16
    """Rank of every adapter."""
    alpha: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    """Scale: the adapter's output is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of adapter inputs in an update. Masks are sampled once for each token of a packed row, and so once for a
    prompt that completions share; all other passes run without dropout."""
    parts: tuple[LoraPart, ...] = ("language_model",)
    """Parts of the model that get adapters; with adapters on the vision parts, images are encoded in every pass."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the linear layers that get an adapter; all-linear: all but the experts of a mixture."""
    exclude: tuple[str, ...] = ()
    """Regular expressions; a layer with a match anywhere in its path gets no adapter."""
    adapter: str | None = None
    """Folder of an adapter in peft's format (safetensors) from which training starts; it must have this rank, alpha and
    these layers. Default: a new adapter that changes nothing yet."""

    @classmethod
    def completed(cls, given: Tree) -> Tree:
        """The settings as given; text in place of a list is short for a list of one."""
        short = {key: (value,) for key in cls.short_lists if isinstance(value := given.get(key), str)}
        return super().completed(given | short)

    def contradictions(self) -> Iterator[str]:
        for pattern in self.exclude:
            try:
                re.compile(pattern)
            except re.error as error:
                yield (
                    f"model.lora.exclude: {pattern} is not a regular expression ({error}); escape literal characters"
                )


class Model(Section):
    """Which model is trained: `model.path` (a folder or Hub id) or `model.tiny`."""

    path: str | None = None
    """Folder or Hub id of a model; `fovea doctor --families` lists the supported types, others need family=auto."""
    revision: Annotated[str, Field(min_length=1)] | None = None
    """Commit, tag or branch of a hub id; only a commit pins the model. Default: the current main branch."""
    family: Literal["named", "auto"] = "named"
    """named: a model of a family that Fovea knows; auto: any other image-text-to-text model of transformers, with its
    own processor, positions and forward, after a check at the start of the run."""
    tiny: TinyModel | None = None
    """Make a tiny model with random weights instead of loading one."""
    chat_template_kwargs: dict[str, str | bool | int | float | None] = Field(default_factory=dict)
    """Arguments of the model's chat template, such as `{enable_thinking: false}`. They apply to every prompt and later
    turn and to requests of `fovea eval` to servers, and become defaults in the template of an export."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations; log-probs, losses and the optimizer's weights are always float32."""
    attention: MayChange[Literal["auto", "merged", "varlen", "varlen_gathered", "sdpa", "eager"]] = "auto"
    """Attention kernel for packed rows. auto: merged on CPU, varlen on CUDA in bfloat16; if varlen is refused, which
    the start of the run reports, varlen_gathered or sdpa, which copy the prompt for every completion. eager: the plain
    formula, for checks."""
    fast_path: MayChange[Literal["auto", "off"]] = "auto"
    """auto: packed rows with shared prompts and the embedded engine's own decoding, if the family has them; off:
    transformers' own forward in trainer and engine, which is slow, for checks."""
    freeze_vision_tower: bool = False
    """Train only the language model; an image is then encoded once, as long as it fits into feature_cache_gib."""
    freeze_projector: bool | None = None
    """Freeze the layers that turn the tower's output into visual tokens (mergers, connector). Default: as
    freeze_vision_tower. false with a frozen tower trains them, and images are then encoded in every pass."""
    feature_cache_gib: MayChange[NonNegativeFloat] = 2.0
    """Memory for the features of a frozen vision tower; the least recently used are evicted."""
    freeze_router: bool = False
    """Freeze the router, which chooses the experts of a token; the experts themselves are trained."""
    lora: Lora | None = None
    """Train adapters instead of the weights, which are then frozen."""
    min_pixels: PositiveInt | None = None
    """Smaller images are scaled up to this area; default: the model's setting."""
    max_pixels: PositiveInt | None = None
    """Larger images are scaled down to this area; default: the model's setting."""
    device: MayChange[Literal["auto", "cpu", "cuda"]] = "auto"
    """Device of model and optimizer. auto: cuda if there is a GPU; the run prints its choice."""

    @classmethod
    def completed(cls, given: Tree) -> Tree:
        """The settings as given; YAML reads `fast_path: off` as false."""
        off = {"fast_path": "off"} if given.get("fast_path") is False else {}
        return super().completed(given | off)

    def contradictions(self) -> Iterator[str]:
        if (self.path is None) == (self.tiny is None):
            yield "model: set exactly one of model.path (a folder or hub id) and model.tiny (a small model made here)"
        if self.revision is not None and self.tiny is not None:
            yield (
                f"model.revision={self.revision}, but model.tiny is made here and has no revisions; set "
                "model.revision=null"
            )
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            yield f"model: min_pixels={self.min_pixels} is above max_pixels={self.max_pixels}; swap them"
        if self.lora is not None and self.freeze_projector is False and not self.trains_projector:
            yield (
                f"model.freeze_projector=false, but with model.lora only adapters of {', '.join(self.lora.parts)} are "
                "trained; leave model.freeze_projector out, add projector to model.lora.parts, or set model.lora=null"
            )
        if self.lora is not None and self.freeze_vision_tower and self.trains_tower:
            yield "model.freeze_vision_tower=true, but model.lora.parts names the vision tower; drop one of the two"

    @property
    def name(self) -> str:
        """Name of the model in messages."""
        if self.path is not None:
            return self.path
        assert self.tiny is not None
        return f"tiny {self.tiny.family}"

    @property
    def has_dropout(self) -> bool:
        """True if updates apply dropout to adapter inputs."""
        return self.lora is not None and self.lora.dropout > 0

    @property
    def trains_tower(self) -> bool:
        """True if the vision tower without its projector, or an adapter on it, is trained."""
        return not self.freeze_vision_tower if self.lora is None else "vision_tower" in self.lora.parts

    @property
    def trains_projector(self) -> bool:
        """True if the projector or adapters on it are trained."""
        frozen = self.freeze_vision_tower if self.freeze_projector is None else self.freeze_projector
        return not frozen if self.lora is None else "projector" in self.lora.parts

    @property
    def trains_vision(self) -> bool:
        """True if image features change in training."""
        return self.trains_tower or self.trains_projector
