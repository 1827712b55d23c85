"""Extension of vLLM's workers: they load a weight sync in buckets, then report hashes of the weights that they hold.

`worker_extension_cls` adds these methods to vLLM's own worker class, in whichever process it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
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
"""vLLM's id of the policy's adapter, the only adapter."""

Slices: TypeAlias = Mapping[str, Sequence[tuple[str, int]]]
"""Maps each vLLM parameter to the weights that it consists of, in order, with their numbers of rows."""


class WeightReceiver:
    """Methods of a worker that receive weights under their checkpoint names."""

    vllm_config: Any
    model_runner: Any
    arrived: Sequence[Tensor] = ()
    """Hashes of the weights that have arrived in this weight sync, in the model's dtype."""
    experts: frozenset[str] = frozenset()
    """Names of the expert weights that have arrived."""

    @torch.no_grad()
    def begin_sync(self) -> None:
        """Prepare every layer for new weights; a layer loads them once all of its weights have arrived."""
        # silences warnings about layers without weights, such as rotary embeddings: all weights are compared later. Set
        # here, because vLLM resets its log levels when it starts
        RELOADING.setLevel(logging.ERROR)
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            # after a weight sync that failed, layers may still be waiting for the rest of their weights
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            initialize_layerwise_reload(model)
        self.arrived, self.experts = [], frozenset()

    @torch.no_grad()
    def receive_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Load a bucket of weights."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(iter(weights))
        self.experts |= {name for name, _ in weights if name.endswith(EXPERTS)}
        dtype = self.vllm_config.model_config.dtype
        self.arrived = [*self.arrived, *(value_hash(tensor, dtype) for _, tensor in weights)]

    @torch.no_grad()
    def finish_sync(self, slices: Slices) -> tuple[list[int], dict[str, int]]:
        """Complete the layers; returns hashes of the weights that arrived, and of the weights now in `slices`."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            # vLLM does not process a head that shares the embedding's weight on a reload; on a CPU, its kernel
            # multiplies by a packed copy, which would still hold the older weights
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
            if current_platform.is_cpu():
                # the same for experts: vLLM (0.32) packs only the first weights that it loads
                for layer in {name.rpartition(".")[0] for name in model.hf_to_vllm_mapper.apply_list([*self.experts])}:
                    experts: Any = model.get_submodule(f"{layer}.routed_experts")
                    experts.quant_method.moe_kernel.fused_experts.process_weights_after_loading(experts)
        self.model_runner.reset_lora_state()
        dtype = self.vllm_config.model_config.dtype
        now = {name: value_hash(held, dtype) for parameter in slices for name, held in _held(model, parameter, slices)}
        arrived, held = read_hashes(self.arrived, list(now.values()))
        return arrived, dict(zip(now, held, strict=True))

    @torch.no_grad()
    def take_adapter(self, tensors: dict[str, Tensor], rank: int, alpha: int) -> int:
        """Replace the adapter; returns the number of matrices that the layers hold exactly as they were sent.

        The worker keeps `tensors` and changes them in place.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            # under the names in peft's files
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
    """Count an adapter's matrices, packed for a layer, that the layer holds in its slot for adapters."""
    pairs = [(layer.lora_a_stacked, parts.lora_a), (layer.lora_b_stacked, parts.lora_b)]
    listed = [(stacked, given if isinstance(given, list) else [given]) for stacked, given in pairs]
    return sum(
        torch.equal(place[slot, 0, : matrix.shape[0], : matrix.shape[1]].to(matrix.device), matrix.to(place.dtype))
        for stacked, given in listed
        for place, matrix in zip(stacked, given, strict=True)
        if matrix is not None
    )


def _held(model: nn.Module, parameter: str, slices: Slices) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that a vLLM parameter consists of."""
    whole, start = _readable(model, parameter), 0
    for name, rows in slices[parameter]:
        # slices leave out the rows with which vLLM pads an embedding
        yield name, whole[start : start + rows]
        start += rows


def _readable(model: nn.Module, parameter: str) -> Tensor:
    """Read a parameter's values; a weight that a kernel has packed is computed as its output for unit vectors."""
    path, _, leaf = parameter.rpartition(".")
    layer: Any = model.get_submodule(path)
    values: Tensor = getattr(layer, leaf)
    # on a CPU, the convolution of a delta net has a packed weight, and also keeps the unpacked one
    unpacked: Tensor | None = getattr(layer, "_cpu_unpacked_conv_weight", None)
    if unpacked is not None:
        return unpacked
    if values.numel() or leaf != "weight":
        return values
    units = torch.eye(layer.input_size, dtype=values.dtype, device=values.device)
    product: Tensor = layer.quant_method.apply(layer, units, None)
    return product.T.contiguous()


RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as the maximum LoRA rank (`vllm.config.lora.MaxLoRARanks`)."""
REQUEST = LoRARequest("policy", ADAPTER_ID, "in memory")
"""LoRA request that makes vLLM use the adapter; vLLM never reads its path."""


class VllmAdapter:
    """Collects the matrices of an adapter, and loads them into vLLM once all have arrived."""

    def __init__(self, llm: LLMEngine, settings: Lora) -> None:
        self._llm = llm
        self._settings = settings
        self.is_complete = False
        """True if vLLM holds the whole adapter of the last weight sync."""
        self._tensors: dict[str, Tensor] = {}

    def begin(self, shapes: Mapping[str, Shape]) -> None:
        """Prepare for matrices of these shapes; EngineError unless each layer among them has both A and B."""
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
        """Copy a bucket of matrices: vLLM scales B in place, and trainer and engine may share the tensor."""
        self._tensors |= {name: tensor.clone() for name, tensor in bucket}

    def finish(self) -> None:
        """Replace the adapter in vLLM; EngineError if a matrix has no layer there, or arrives with other values."""
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
        """Record that vLLM has freed the adapter."""
        self.is_complete = False


def room_for(rank: int) -> int:
    """Smallest maximum LoRA rank of vLLM that is large enough for this rank."""
    return next(each for each in RANKS if each >= rank)
