"""Stand-ins for CUDA and Transformer Engine, with which Megatron's own code runs on a CPU. For tests alone.

Megatron-core asks `torch.cuda` for devices, random states and streams also where nothing is on a GPU, and
megatron-bridge builds its layers of Transformer Engine, whose wheels need CUDA. Here the first gets a CPU's answers and
the second Megatron-core's own layers in plain torch, under Transformer Engine's parameter names. What this cannot show
is Transformer Engine's kernels, NCCL, and numbers of 16 bits.

`install` comes before the first import of anything of Megatron's.
"""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import sys
import types
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
STUBBED = ("transformer_engine", "transformer_engine.pytorch", "triton", "triton.language")


def install() -> None:
    """Make Megatron's packages importable and their models trainable without CUDA, in this process."""
    if "megatron.bridge" in sys.modules:
        return
    _cuda()
    _scatter()
    warnings.filterwarnings("ignore", message=".*(Apex|GroupedMLP).*")
    for name in ("models.gpt.gpt_layer_specs", "transformer.attention", "extensions.transformer_engine"):
        importlib.import_module(f"megatron.core.{name}")  # before the stubs, which these must not find
    for name in STUBBED:
        _stub(name)
    importlib.import_module("megatron.bridge")
    for name in [name for name in sys.modules if name.split(".")[0] in ("transformer_engine", "triton")]:
        del sys.modules[name]  # others ask whether these packages are there
    _random_states()
    _causal_mask()
    _steps_of_adamw()
    _norms()
    _layers()
    _routing()
    CudaToCpu().__enter__()


def _cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.manual_seed_all = lambda _seed: None
    cuda.get_rng_state = lambda _device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, _device=None: torch.set_rng_state(state)
    cuda.nvtx.range_push = lambda *_: 0
    cuda.nvtx.range_pop = lambda: 0
    cuda.synchronize = lambda *_args, **_kwargs: None
    cuda.empty_cache = lambda: None
    cuda.stream = lambda _stream: nullcontext()
    cuda.current_stream = _Stream
    cuda.Stream = _Stream


class _Stream:
    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def wait_stream(self, _other: object) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...


def _scatter() -> None:
    scatter = dist.scatter

    def contiguous(tensor: Tensor, scatter_list: list[Tensor] | None = None, **options: Any) -> Any:
        # gloo ignores strides without a word
        return scatter(tensor, scatter_list and [each.contiguous() for each in scatter_list], **options)

    dist.scatter = contiguous


def _random_states() -> None:
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)


def _causal_mask() -> None:
    import megatron.core.fusions.fused_softmax as fused_softmax
    import megatron.core.transformer.utils as utils

    for module in (fused_softmax, utils):
        module.get_default_causal_mask = lambda size: torch.triu(torch.ones(size, size, dtype=torch.bool), 1)


def _steps_of_adamw() -> None:
    """Restore the step counts of torch's AdamW: Megatron reads those of Transformer Engine's, which are in groups."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    restore = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        step = state.pop("step")
        restore(self, model_param, tensors)
        state["step"] = step.clone()  # so far one tensor for all weights, to which each would add 1

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def _norms() -> None:
    """Let norms run on a part of the tokens, with the mark that Transformer Engine's have for the sum of gradients."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *arguments: Any, **options: Any) -> Any:
        whole = copy.copy(config)
        whole.sequence_parallel = False  # which Megatron-core asserts
        norm = make(cls, whole, *arguments, **options)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = marked


class _Stub(types.ModuleType):
    """A package whose every class is an empty module, for imports whose names no CPU model uses."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = _stub(f"{self.__name__}.{name}") if name.islower() else type(name, (nn.Module,), {})
        setattr(self, name, made)
        return made

    def __call__(self, *arguments: Any, **_options: Any) -> Any:
        """A decorator, plain or with options, that changes nothing."""
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else (lambda function: function)


def _stub(name: str) -> _Stub:
    module = _Stub(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module


def _layers() -> None:
    """Let the bridge's providers build Megatron-core's local layers, with norms where Transformer Engine has them."""
    import megatron.bridge.models.gpt_provider as gpt_provider
    import megatron.bridge.models.qwen_vl.qwen3_vl_provider as qwen3_vl_provider
    import megatron.bridge.peft.utils as peft
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    class TELayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
        """Linear layer behind an RMS norm, under the names that Transformer Engine gives both."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
            options.pop("stride", None)
            super().__init__(input_size, output_size, config=config, **options)
            self.layer_norm_weight = nn.Parameter(torch.ones(input_size))
            self.layer_norm_weight.sequence_parallel = config.sequence_parallel
            self.eps = config.layernorm_epsilon
            self.in_features, self.out_features = input_size, self.output_size_per_partition
            # for an adapter, which gets the normed input: of all tokens, where each rank has a part of them
            self.return_layernorm_output = self.return_layernorm_output_gathered = False

        def forward(self, hidden: Tensor, *arguments: Any, **options: Any) -> Any:
            normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps) * self.layer_norm_weight
            out, bias = super().forward(normed, *arguments, **options)
            if not self.return_layernorm_output:
                return out, bias
            whole = gather_from_sequence_parallel_region(normed) if self.return_layernorm_output_gathered else normed
            return (out, whole), bias

    AutoMapping.register_module_type("TELayerNormColumnParallelLinear", "column")
    peft.HAVE_TE, peft.TECL, peft.TERL, peft.TELinear = True, (TELayerNormColumnParallelLinear,), (), ()
    peft.TELayerNormColumnParallelLinear = TELayerNormColumnParallelLinear
    peft.version = lambda _package: "2"  # of Transformer Engine

    def spec(*_args: Any, qk_layernorm: bool = False, num_experts: int | None = None, **_options: Any) -> Any:
        made = get_gpt_layer_local_spec(num_experts=num_experts, normalization="RMSNorm", qk_layernorm=qk_layernorm)
        parts = made.submodules
        parts.input_layernorm = IdentityOp
        parts.self_attention.submodules.core_attention = PackedAttention
        parts.self_attention.submodules.linear_qkv = TELayerNormColumnParallelLinear
        if num_experts is None:
            parts.pre_mlp_layernorm = IdentityOp
            parts.mlp.submodules.linear_fc1 = TELayerNormColumnParallelLinear
        else:
            grouped = MLPSubmodules(linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear)
            parts.mlp.submodules.experts = ModuleSpec(module=TEGroupedMLP, submodules=grouped)
        return made

    for module in (gpt_provider, qwen3_vl_provider):
        module.get_gpt_layer_with_transformer_engine_spec = spec


def _routing() -> None:
    """Let tokens travel to their experts and back."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None  # which Megatron-core asks for without having defined it

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # it is there already, for which Megatron-core leaves out the other half of the conversion
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host


class GroupedLinear(nn.Module):
    """Linear layers of the experts of a rank, under the names that Transformer Engine gives them."""

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        self._groups = pg_collection
        for number in range(num_experts):
            weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            init_method(weight)
            weight.tensor_model_parallel = True  # it counts in the gradient's norm on each rank
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{number}", weight)

    def forward(self, tokens: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        parts = zip(tokens.split(tokens_per_expert), self.parameters(), strict=True)
        return torch.cat([part @ weight.t() for part, weight in parts]), None

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Any) -> dict[str, Any]:
        """Each expert's weight as a part of one tensor of all experts, whichever rank has it."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
        from megatron.core.utils import get_pg_rank, get_pg_size

        weights = list(self.parameters())
        first, num = get_pg_rank(self._groups.ep) * len(weights), get_pg_size(self._groups.ep) * len(weights)
        made = {}
        for number, weight in enumerate(weights):
            offsets = (*sharded_offsets, (len(sharded_offsets), first + number, num))
            key = f"{prefix}weight"
            sharded = make_sharded_tensors_for_checkpoint(
                {key: weight}, "", {}, offsets, tp_group=self._groups.expt_tp, dp_cp_group=metadata["dp_cp_group"]
            )[key]
            sharded.replica_id = (*sharded.replica_id[:2], get_pg_rank(self._groups.expt_dp))
            made[f"{prefix}weight{number}"] = sharded
        return made


class PackedAttention(nn.Module):
    """Attention of packed rows [N, heads, width], each to itself."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_args: Any, **options: Any) -> Tensor:
        sequences = options["packed_seq_params"]
        assert (sequences.qkv_format, len(query)) == ("thd", sequences.cu_seqlens_q[-1])
        lengths = sequences.cu_seqlens_q.diff().tolist()
        rows = (each.transpose(0, 1).split(lengths, 1) for each in (query, key, value))
        out = [scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True) for row in zip(*rows, strict=True)]
        return torch.cat(out, 1).transpose(0, 1)


class TEColumnParallelGroupedLinear(GroupedLinear): ...


class TERowParallelGroupedLinear(GroupedLinear): ...


class CudaToCpu(TorchFunctionMode):
    """Reads `cuda` as `cpu` in every call of torch, and names tensors' types as CUDA's, which Megatron asserts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)
