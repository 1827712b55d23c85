"""Additions to vLLM's workers: they load a weight sync in pieces, and report what they hold afterwards.

`worker_extension_cls` adds these methods to vLLM's own worker class, in whichever process it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from fovea.config.model import Lora
from fovea.errors import EngineError
from fovea.models.transformers_versions import EXPERTS
from fovea.types import Shape
from fovea.utils.checksum import read_hashes, value_hash

RELOADING = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")

ADAPTER_ID = 1
"""vLLM's number of the policy's adapter, its only one."""

Slices: TypeAlias = Mapping[str, Sequence[tuple[str, int]]]
"""By the name of a parameter of vLLM, the weights that it is made of, in order, with their rows."""


class WeightReceiver:
    """Methods of a worker; weights come under the names of checkpoints."""

    vllm_config: Any
    model_runner: Any
    arrived: Sequence[Tensor] = ()
    """Hashes of what arrived of a weight sync, in the model's type."""
    experts: frozenset[str] = frozenset()
    """Names of the experts that have arrived."""

    @torch.no_grad()
    def begin_sync(self) -> None:
        """Prepare every layer for new weights; a layer takes them when all its weights have come."""
        # it warns of layers with nothing to load, such as rotary embeddings; what layers hold is compared afterwards.
        # here, since vLLM resets the levels of its loggers when it starts
        RELOADING.setLevel(logging.ERROR)
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            # of a weight sync that failed, layers may still wait for the rest of their weights
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            initialize_layerwise_reload(model)
        self.arrived, self.experts = [], frozenset()

    @torch.no_grad()
    def receive_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Load some weights."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(iter(weights))
        self.experts |= {name for name, _ in weights if name.endswith(EXPERTS)}
        dtype = self.vllm_config.model_config.dtype
        self.arrived = [*self.arrived, *(value_hash(tensor, dtype) for _, tensor in weights)]

    @torch.no_grad()
    def finish_sync(self, slices: Slices) -> tuple[list[int], dict[str, int]]:
        """Complete the layers; returns the hashes of what arrived, and of `slices` as the model holds them now."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            _repack_tied_head(model)
            if current_platform.is_cpu():
                _repack_experts(model, self.experts)
        self.model_runner.reset_lora_state()
        dtype = self.vllm_config.model_config.dtype
        now = {name: value_hash(held, dtype) for parameter in slices for name, held in _held(model, parameter, slices)}
        arrived, held = read_hashes(self.arrived, list(now.values()))
        return arrived, dict(zip(now, held, strict=True))

    @torch.no_grad()
    def take_adapter(self, tensors: dict[str, Tensor], rank: int, alpha: int) -> int:
        """Replace the adapter; returns the number of its matrices that layers hold as they were sent.

        `tensors` are kept, and changed.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            # as peft writes them to a file
            {f"base_model.model.{name.replace('.default', '')}": tensor for name, tensor in tensors.items()},
            PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),
            device="cpu",
            dtype=self.vllm_config.lora_config.lora_dtype,
            weights_mapper=self.model_runner.get_model().hf_to_vllm_mapper.get_rename_mapper(),
        )
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)
        slot = manager.lora_index_to_id.index(ADAPTER_ID)
        layers = [(manager.modules.get(name), parts) for name, parts in adapter.loras.items()]
        return sum(_matrices_held(layer, slot, parts) for layer, parts in layers if layer is not None)


def _matrices_held(layer: Any, slot: int, parts: Any) -> int:
    """How many of the matrices of an adapter, packed for a layer, stand in its place for adapters."""
    pairs = [(layer.lora_a_stacked, parts.lora_a), (layer.lora_b_stacked, parts.lora_b)]
    listed = [(stacked, given if isinstance(given, list) else [given]) for stacked, given in pairs]
    return sum(
        torch.equal(place[slot, 0, : matrix.shape[0], : matrix.shape[1]].to(matrix.device), matrix.to(place.dtype))
        for stacked, given in listed
        for place, matrix in zip(stacked, given, strict=True)
        if matrix is not None
    )


def _repack_tied_head(model: nn.Module) -> None:
    """Process a head again that shares the embedding's weight, and so was not processed.

    On a CPU its kernel multiplies with a packed copy, which would stay that of the older weights.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _repack_experts(model: Any, names: Iterable[str]) -> None:
    """Process layers again whose experts have been replaced.

    On a CPU their kernel multiplies with a packed copy, and vLLM (0.32) packs only the first weights that it loads.
    """
    for layer in {name.rpartition(".")[0] for name in model.hf_to_vllm_mapper.apply_list(list(names))}:
        experts: Any = model.get_submodule(f"{layer}.routed_experts")
        experts.quant_method.moe_kernel.fused_experts.process_weights_after_loading(experts)


def _held(model: nn.Module, parameter: str, slices: Slices) -> Iterator[tuple[str, Tensor]]:
    """The weights that a parameter of vLLM is made of."""
    whole, start = _readable(model, parameter), 0
    for name, rows in slices[parameter]:
        # vLLM pads the rows of an embedding
        yield name, whole[start : start + rows]
        start += rows


def _readable(model: nn.Module, parameter: str) -> Tensor:
    """A parameter's values; those of a weight that a kernel has packed away are what it gives for unit vectors."""
    path, _, leaf = parameter.rpartition(".")
    layer: Any = model.get_submodule(path)
    values: Tensor = getattr(layer, leaf)
    # the convolution of a delta net on a CPU has its weight packed, and keeps what was packed
    unpacked: Tensor | None = getattr(layer, "_cpu_unpacked_conv_weight", None)
    if unpacked is not None:
        return unpacked
    if values.numel() or leaf != "weight":
        return values
    units = torch.eye(layer.input_size, dtype=values.dtype, device=values.device)
    product: Tensor = layer.quant_method.apply(layer, units, None)
    return product.T.contiguous()


RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for (`vllm.config.lora.MaxLoRARanks`)."""
REQUEST = LoRARequest("policy", ADAPTER_ID, "in memory")
"""LoRA request that makes vLLM use the adapter; never read from that path."""


class VllmAdapter:
    """Loads the matrices of an adapter into vLLM, once all of them have come."""

    def __init__(self, llm: LLMEngine, settings: Lora) -> None:
        self._llm = llm
        self._settings = settings
        self.is_complete = False
        """True if vLLM holds all of the adapter of the last weight sync."""
        self._tensors: dict[str, Tensor] = {}

    def begin(self, shapes: Mapping[str, Shape]) -> None:
        """Prepare for matrices of these shapes; EngineError unless they are A and B of some layers."""
        ends = (".lora_A.default.weight", ".lora_B.default.weight")
        layers = [{name.removesuffix(end) for name in shapes if name.endswith(end)} for end in ends]
        other = [name for name in shapes if not name.endswith(ends)]
        halves = sorted(layers[0] ^ layers[1]) + other
        if halves or not shapes:
            raise EngineError(
                f"vLLM's adapter needs the matrices A and B of every layer, but {len(halves)} layers have only one, "
                f"first {[*halves, 'none'][0]}; both must load the same model: compare model.path on both sides"
            )
        self.is_complete, self._tensors = False, {}

    def take(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Copy some of them: vLLM scales B in place, and trainer and engine may share the tensor."""
        self._tensors |= {name: tensor.clone() for name, tensor in bucket}

    def finish(self) -> None:
        """Replace the last adapter; EngineError if vLLM has no layer for a part of it, or holds other values."""
        sent = len(self._tensors)
        for held in self._llm.collective_rpc(
            "take_adapter", args=(self._tensors, self._settings.rank, self._settings.alpha)
        ):
            if held != sent:
                raise EngineError(
                    f"vLLM holds only {held} of the {sent} matrices of the adapter as they were sent; set "
                    "rollout.engine.enable_lora=false, which sends merged weights"
                )
        self.is_complete, self._tensors = True, {}

    def forget(self) -> None:
        """Take over that vLLM has freed it."""
        self.is_complete = False


def room_for(rank: int) -> int:
    """The smallest rank that vLLM makes room for and this one fits into."""
    return next(each for each in RANKS if each >= rank)
