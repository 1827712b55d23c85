"""A Hugging Face model in Megatron: loaded, run on packed rows, and exported by Megatron's bridge.

Axes: `N` tokens of all rows, `E` width of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from itertools import chain
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForImageTextToText

from fovea.config.backends import MegatronBackend
from fovea.config.model import Lora, Model
from fovea.config.run import Config
from fovea.models.linear_factors import Factors, merged_weight
from fovea.models.load import DTYPES, pick_device
from fovea.models.model_files import check_folder, damaged_model, hub_options
from fovea.models.modules import family_of_network, language_model
from fovea.models.plain import PlainRow, PlainVLM
from fovea.models.trainable import (
    ADAPTER,
    adapted_weights,
    adapter_names,
    adapter_scale,
    choose_trainable,
    factored_weights,
    lora_layers,
    weight_names,
)
from fovea.models.transformers_versions import load_config
from fovea.models.weights_to_sync import WeightToSync
from fovea.train.megatron.packed_rows import PackedRows, attending_to_own_row, pack_rows, rotate_without_waits
from fovea.train.megatron.parallel import ParallelRank
from fovea.train.model_division import FAMILIES, MIXTURE, check_division
from fovea.utils.config_keys import check_config_keys
from fovea_gym.errors import ConfigError

TARGETS = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_proj": ("linear_proj",),
    "linear_fc1": ("linear_fc1_gate", "linear_fc1_up"),
    "linear_fc2": ("linear_fc2",),
}
"""The bridge's names of the projections in each of Megatron's layers, of which it adapts all or none."""
PROJECTIONS = {
    "self_attn.q_proj": ("self_attention", "linear_qkv", "adapter_q"),
    "self_attn.k_proj": ("self_attention", "linear_qkv", "adapter_k"),
    "self_attn.v_proj": ("self_attention", "linear_qkv", "adapter_v"),
    "self_attn.o_proj": ("self_attention", "linear_proj", None),
    "mlp.gate_proj": ("mlp", "linear_fc1", "adapter_gate"),
    "mlp.up_proj": ("mlp", "linear_fc1", "adapter_up"),
    "mlp.down_proj": ("mlp", "linear_fc2", None),
}
"""Megatron's module and layer for each projection of transformers, and the adapter if the layer has several."""


def add_adapters(module: Any, network: nn.Module, lora: Lora) -> None:
    """Add the adapters of `network` (peft's, by transformers' names) to this process's slice of the same model.

    All other weights are frozen. A projection without an adapter in `network` gets one that adds 0 and is not trained
    if other projections of its layer have adapters.
    """
    wanted = {PROJECTIONS[projection][1] for path in lora_layers(network) for projection in [_projection(path)]}
    targets = [f"language_model.*.{target}" for layer in sorted(wanted) for target in TARGETS[layer]]
    CanonicalLoRA(target_modules=targets, dim=lora.rank, alpha=lora.alpha)(module)
    _take_values(module, network)


@contextmanager
def adapters_off(module: Any) -> Iterator[None]:
    """Switch the adapters off in this context: the model is then the one that was loaded."""
    wrappers = [each for each in module.modules() if isinstance(each, AdapterWrapper)]
    for wrapper in wrappers:
        wrapper.disable_adapter_layers()
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper.enable_adapter_layers()


@torch.no_grad()
def _take_values(module: Any, network: nn.Module) -> None:
    """Copy this process's slices of the matrices A and B of all adapters of the network."""
    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    given = lora_layers(network)
    for path, adapter in _adapters(module, f"{family_of_network(network).language_path}.layers"):
        # used only for the format of checkpoints, where linear_fc1 would mean gate and up in one
        adapter.base_linear_name = path
        for part, linear in (("lora_A", adapter.linear_in), ("lora_B", adapter.linear_out)):
            linear.weight.requires_grad_(path in given)
            if path in given:
                whole = getattr(given[path], part)[ADAPTER].weight
                linear.weight.copy_(whole.chunk(size, dim=linear.weight.partition_dim)[rank])


def _adapters(module: Any, layers_path: str) -> Iterator[tuple[str, Any]]:
    """The adapters in this process's layers, with the paths of their projections in transformers."""
    for layer in module.language_model.decoder.layers:
        for projection, (owner, name, key) in PROJECTIONS.items():
            wrapper = getattr(getattr(layer, owner), name)
            if isinstance(wrapper, AdapterWrapper):
                adapter = wrapper.adapter if key is None else wrapper.adapter[key]
                yield f"{layers_path}.{layer.layer_number - 1}.{projection}", adapter


def _projection(path: str) -> str:
    """The last two parts of a path, such as mlp.up_proj."""
    return ".".join(path.split(".")[-2:])


NOT_ON_A_CPU = (
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "persist_layer_norm",
    "cross_entropy_loss_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
)
"""Fused kernels, which Megatron has only for CUDA."""


def skeleton(settings: Model, banned_ids: Sequence[int], seed: int) -> PlainVLM:
    """transformers' modules of the model, without weights: names, sizes, and which of them are trained.

    LoRA adapters have their initial values, from the run's seed or from a folder.

    ConfigError for a model that Megatron cannot train here.
    """
    path = settings.path
    assert path is not None, "a tiny model is loaded from the folder that it was written to"
    check_folder(path, settings.revision)
    with damaged_model(path):
        check_config_keys(path, settings.revision or "main")
        config = load_config(path, **hub_options(settings))
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"train.backend=megatron, but {path} is a {config.model_type}, and only {' and '.join(FAMILIES)} have been "
            "compared with transformers under Megatron; set train.backend=torch"
        )
    if settings.lora is not None and config.model_type == MIXTURE:
        raise ConfigError(
            f"model.lora with train.backend=megatron, but {path} is a {config.model_type}, whose adapters have not "
            "been compared with the torch backend's; leave model.lora out, or set train.backend=torch"
        )
    with torch.device("meta"):
        network = AutoModelForImageTextToText.from_config(config, dtype=DTYPES[settings.dtype])
    network.name_or_path = path
    if settings.lora is not None:
        _make_linears_empty(network)
    choose_trainable(network, settings, seed)
    shape = PlainVLM(network, banned_ids)
    shape.banned_K = shape.banned_K.to(pick_device(settings.device))  # the device of all inputs of passes
    return shape


def _make_linears_empty(network: nn.Module) -> None:
    """Give linear layers host weights that take no memory: peft makes adapters on the device of the layer's weight."""
    for module in language_model(network).modules():
        if isinstance(module, nn.Linear):
            shape, dtype = module.weight.shape, module.weight.dtype
            module.weight = nn.Parameter(torch.zeros((), dtype=dtype).expand(shape))


class MegatronModel:
    """This process's slice of the model: the layers of its pipeline stage, with tensors split over the tensor axis."""

    def __init__(self, config: Config, settings: Model, shape: PlainVLM, place: ParallelRank) -> None:
        self.place = place
        self.shape = shape
        self.device = pick_device(settings.device)
        pretrained = PreTrainedCausalLM.from_pretrained(settings.path, **hub_options(settings))
        # the bridge would read the file as transformers 4 does: for a folder written by version 5, it would miss the
        # rotary settings or fail
        pretrained.config = load_config(str(settings.path), **hub_options(settings))
        self._bridge = AutoBridge(pretrained)
        rotate_without_waits()
        backend = config.train.backend
        assert isinstance(backend, MegatronBackend)
        check_division(shape.network.config.model_type, shape.text_config, backend)
        self.config = self._provider(config, backend, settings)
        with redirect_stdout(StringIO()):  # it prints the number of parameters
            self.chunk = self.config.provide_distributed_model(
                wrap_with_ddp=False, use_cpu_initialization=self.device.type == "cpu"
            )[0]
        self.module: Any = unwrap_model([self.chunk])[0]
        """Megatron's vision-language model without wrappers."""
        if settings.lora is not None:
            add_adapters(self.module, shape.network, settings.lora)
        if settings.freeze_router:
            for name, parameter in self.module.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and ".mlp.router." not in name)
        if backend.sequence_parallel and getattr(self.module, "vision_model", None) is not None:
            self.module.vision_model.register_forward_hook(_sum_deepstack_gradients)
        if config.train.gradient_checkpointing == "full":
            _recompute_layers(self.module)

    def _provider(self, config: Config, backend: MegatronBackend, settings: Model) -> Any:
        """Megatron's settings for the model, from the config in its folder and the run's settings."""
        provider = self._bridge.to_megatron_provider()
        dtype = DTYPES[settings.dtype]
        provider.params_dtype = provider.pipeline_dtype = dtype
        provider.bf16, provider.fp16 = dtype == torch.bfloat16, False
        # for Qwen2.5-VL the bridge keeps the sections of the full-size models
        provider.mrope_section = self.shape.text_config.rope_scaling["mrope_section"]
        provider.freeze_vision_model = not settings.trains_tower
        provider.freeze_vision_projection = not settings.trains_projector
        provider.tensor_model_parallel_size = backend.tensor_parallel_size
        provider.pipeline_model_parallel_size = backend.pipeline_parallel_size
        provider.sequence_parallel = backend.sequence_parallel
        # micro-batches of a pipeline differ in length, which Megatron allows only with this expert dispatcher
        provider.variable_seq_lengths = backend.pipeline_parallel_size > 1
        provider.moe_token_dispatcher_type = "alltoall"
        # the fused kernel counts positions of packed rows from 0, which is not how M-RoPE numbers them
        provider.apply_rope_fusion = False
        if self.shape.network.config.model_type == MIXTURE:
            provider.freeze_language_model = False
            provider.expert_model_parallel_size = backend.expert_parallel_size
            provider.expert_tensor_parallel_size = 1
            provider.moe_router_load_balancing_type, provider.moe_aux_loss_coeff = "none", 0.0
            # the engine's router computes in the model's dtype as well
            provider.moe_router_dtype = None
        # the bridge would skip initialization, since it loads weights later; but that also marks the tensors that are
        # split, without which Megatron would not count each of them in the gradient norm
        provider.perform_initialization = True
        if self.device.type == "cpu":
            for name in NOT_ON_A_CPU:
                setattr(provider, name, False)
        provider.finalize_model_grads_func = finalize_model_grads
        provider.finalize()
        return provider

    def for_training(self) -> DistributedDataParallel:
        """The model with gradient buffers, which sum over micro-batches and then over shares."""
        settings = DistributedDataParallelConfig(
            # also for a single share: the files of this optimizer can be read by another number of processes
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=False,
        )
        return DistributedDataParallel(self.config, settings, self.chunk)

    def pack(self, rows: Sequence[PlainRow]) -> PackedRows:
        """Join rows for `states`, padded to a multiple of the number of tensor ranks.

        Sequence parallelism divides the tokens evenly among these ranks, and the bridge's adapters, which count the
        heads of all ranks, are correct only for such a multiple.
        """
        return pack_rows(rows, self.shape.family, multiple_of=self.config.tensor_model_parallel_size)

    def states(self, model: Any, packed: PackedRows) -> Tensor:
        """Output of this stage for packed rows; on the last stage the hidden states [N, 1, E] after the final norm.

        `model` is this model or a wrapper of it.
        """
        ids_1N = packed.token_ids_N[None]
        inputs = self.shape.family.forward_inputs(ids_1N, packed.images)
        inputs.pop("mm_token_type_ids", None)
        language = self.module.language_model
        with _without_head(language), attending_to_own_row(language, packed):
            states: Tensor = model(input_ids=ids_1N, position_ids=None, attention_mask=None, **inputs)
        if self.config.sequence_parallel and self.module.post_process:
            # each rank gets the whole gradient (`MegatronPasses`) and continues with the slice of its tokens
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        return states.contiguous()  # a stage can send only contiguous tensors

    @property
    def head(self) -> Tensor:
        """This rank's slice of the language-model head; only on the last stage."""
        language = self.module.language_model
        tied = language.share_embeddings_and_output_weights
        weight: Tensor = language.shared_embedding_or_output_weight() if tied else language.output_layer.weight
        return weight

    def weights_to_sync(self) -> Iterator[WeightToSync]:
        """Every full weight under its Hugging Face name, with adapters separate.

        All ranks must call it together; each gets the same weights.
        """
        trained = {name for name, parameter in factored_weights(self.shape.network) if parameter.requires_grad}
        for name, tensor in chain(self._base_weights(), self._adapter_weights()):
            yield WeightToSync(name=name, parameter=tensor.detach().requires_grad_(name in trained))

    def merged_weights_to_sync(self) -> Iterator[WeightToSync]:
        """As `weights_to_sync`, but with each adapter merged into its weight."""
        trained = {
            name
            for name, parameter, adapter in adapted_weights(self.shape.network)
            if parameter.requires_grad or adapter is not None
        }
        adapters, scale = dict(self._adapter_weights()), adapter_scale(self.shape.network)
        for name, tensor in self._base_weights():
            down, up = (adapters.get(matrix) for matrix in adapter_names(name.removesuffix(".weight")))
            merged = merged_weight(Factors(tensor.detach(), None, down, up, scale))
            yield WeightToSync(name=name, parameter=merged.requires_grad_(name in trained))

    def _base_weights(self) -> Iterator[tuple[str, Tensor]]:
        wanted = weight_names(self.shape.network)
        for exported, tensor in self._bridge.export_hf_weights(
            [self.chunk], cpu=False, show_progress=False, merge_adapter_weights=False
        ):
            name = self._module_name(exported).replace(".base_layer.", ".")
            if name in wanted:  # a tied head is also exported under a separate name
                yield name, tensor

    def _adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        wanted = weight_names(self.shape.network)
        for exported, tensor in self._bridge.export_adapter_weights([self.chunk], cpu=False, show_progress=False):
            name = self._module_name(exported).removesuffix(".weight") + f".{ADAPTER}.weight"
            if name in wanted:  # not one that only completes its layer (`add_adapters`)
                yield name, tensor.detach()

    def _module_name(self, exported: str) -> str:
        """transformers' name of a parameter; for Qwen2.5-VL it differs from the name in files."""
        renamed = getattr(self.shape.network, "_checkpoint_conversion_mapping", {})
        for pattern, replacement in renamed.items():
            exported, found = re.subn(pattern, replacement, exported)
            if found:
                break
        return exported


def _sum_deepstack_gradients(
    _tower: Any, _inputs: Any, out: tuple[Tensor, list[Tensor]]
) -> tuple[Tensor, list[Tensor]]:
    """Sum the gradient of deepstack features over all ranks, since each rank adds them only to its own tokens.

    Megatron then averages the tower's gradients over the ranks; without this sum they would be too small.
    """
    tokens, deepstack = out
    return tokens, [copy_to_tensor_model_parallel_region(features) for features in deepstack]


@torch.no_grad()
def copy_slices(source: MegatronModel, target: MegatronModel) -> None:
    """Copy this process's slices of one model into those of another, which is divided in the same way."""
    for mine, theirs in zip(source.chunk.parameters(), target.chunk.parameters(), strict=True):
        theirs.copy_(mine)


def _recompute_layers(module: Any) -> None:
    """Recompute each decoder layer of this stage from its inputs in the backward pass.

    Megatron's `recompute_granularity` does the same, but it can save only tensors, and the bridge's Qwen3-VL passes a
    list of deepstack features.
    """
    for layer in module.language_model.decoder.layers:
        # the layers have no dropout, so no random state needs restoring
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


@contextmanager
def _without_head(language: Any) -> Iterator[None]:
    """Make the last stage return hidden states instead of logits for all tokens, few of which predict an action."""
    before, language.post_process = language.post_process, False
    try:
        yield
    finally:
        language.post_process = before
