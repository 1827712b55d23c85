"""Weight sync into vLLM: names and shapes are checked first, then weights are loaded in buckets, then read back.

vLLM fuses weights (q, k and v; gate and up), and loading only a part of such a group corrupts it without an error. The
first weight sync must therefore send all weights of the checkpoint that vLLM was started from, and later ones all
weights of each layer that they touch; any other weight sync is refused before it begins. vLLM itself refuses to start
if one of its parameters is missing from that checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.v1.engine.llm_engine import LLMEngine

from fovea.errors import EngineError
from fovea.models.transformers_versions import EXPERTS
from fovea.rollout.checks import check_shapes, checkpoint_shapes
from fovea.rollout.vllm.worker import Slices
from fovea.types import Shape
from fovea.utils.checksum import read_hashes, value_hash

FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""Weights that the language models of all families fuse, since vLLM's class of Qwen2-VL does not declare them."""


class ExpectedWeights:
    """The weights of the checkpoint that vLLM was started from, by vLLM's names."""

    def __init__(self, config: Any, *, is_sharded: bool) -> None:
        """`config` is vLLM's ModelConfig; `is_sharded` says that parameters are split over several workers."""
        model_class: Any = get_model_architecture(config)[0]
        self._mapper = model_class.hf_to_vllm_mapper
        self._fused: Mapping[str, Sequence[str]] = model_class.packed_modules_mapping | FUSED
        self.dtype: torch.dtype = config.dtype
        is_tied = config.hf_text_config.tie_word_embeddings or config.hf_config.tie_word_embeddings
        self._expected = {
            self.vllm_name(name): (name, shape)
            for name, shape in checkpoint_shapes(config.model, config.revision, is_tied=is_tied).items()
        }
        # a shard of a parameter cannot be compared with the whole
        self.slices: Slices = {} if is_sharded else self._slices_of_expected()

    def check(self, shapes: Mapping[str, Shape], *, has_all: bool = False) -> None:
        """Raise EngineError unless vLLM's weights are complete after a weight sync of these names and shapes.

        With `has_all`, earlier weight syncs have sent all weights.
        """
        keys = {self.vllm_name(name): name for name in shapes}
        touched = {self._layer(key) for key in keys}
        wanted = {
            name: shape for key, (name, shape) in self._expected.items() if not has_all or self._layer(key) in touched
        }
        # under the names in the checkpoint, which may differ from the trainer's
        known = {key: name for key, (name, _) in self._expected.items()}
        sent = {known.get(key, name): shapes[name] for key, name in keys.items()}
        check_shapes(sent, wanted, engine="vLLM")

    def vllm_name(self, name: str) -> str:
        """Map the name of a weight in the checkpoint to its name in vLLM before fusion."""
        (mapped,) = self._mapper.apply_list([name])
        return str(mapped)

    def _slices_of_expected(self) -> dict[str, list[tuple[str, int]]]:
        """Map each vLLM parameter to the weights that it is fused from, in order.

        Experts are left out, because each of vLLM's kernels lays them out differently.
        """
        slices: dict[str, dict[int, tuple[str, int]]] = {}
        for name, (_, shape) in self._expected.items():
            if not name.endswith(EXPERTS):
                parameter, place = self._place(name)
                slices.setdefault(parameter, {})[place] = (name, shape[0])
        return {parameter: [parts[place] for place in sorted(parts)] for parameter, parts in slices.items()}

    def _layer(self, name: str) -> str:
        """Name of the vLLM layer that holds a weight, fused or not."""
        return self._place(name)[0].rpartition(".")[0]

    def _place(self, name: str) -> tuple[str, int]:
        """Name of the vLLM parameter that a weight belongs to, and the weight's index in it."""
        for fused, parts in self._fused.items():
            for place, part in enumerate(parts):
                if f".{part}." in name:
                    return name.replace(f".{part}.", f".{fused}."), place
        return name, 0


class VllmWeights:
    """Loads the weights of a policy into vLLM in this process."""

    def __init__(self, llm: LLMEngine) -> None:
        self._llm = llm
        is_sharded = llm.vllm_config.parallel_config.world_size > 1
        self._expected = ExpectedWeights(llm.model_config, is_sharded=is_sharded)
        self.are_complete = False
        """True if vLLM holds all weights, and the last weight sync has finished."""
        self._sending: dict[str, Tensor] = {}
        """Hashes of the values of this weight sync, by checkpoint names; still on the device."""
        self._sent: dict[str, int] = {}
        """Hashes of the newest values that were sent, by vLLM's names."""

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise EngineError unless these are the names and shapes of all weights.

        Once all weights have been sent, a subset of complete layers is allowed.
        """
        self._expected.check(shapes, has_all=self.are_complete)

    def begin(self) -> None:
        """Prepare for weights that `check` has accepted."""
        self.are_complete, self._sending = False, {}
        self._llm.collective_rpc("begin_sync")

    def take(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load a bucket of weights."""
        self._sending |= {name: value_hash(tensor, self._expected.dtype) for name, tensor in bucket}
        self._llm.collective_rpc("receive_weights", args=(bucket,))

    def finish(self) -> None:
        """Finish the weight sync.

        Raises EngineError if a worker received another value than was sent, or if vLLM's weights differ from those of
        this weight sync and earlier ones.
        """
        (bits,) = read_hashes(list(self._sending.values()))
        sent = dict(zip(self._sending, bits, strict=True))
        self._sent |= {self._expected.vllm_name(name): value for name, value in sent.items()}
        for arrived, held in self._llm.collective_rpc("finish_sync", args=(self._expected.slices,)):
            compare(sent, dict(zip(sent, arrived, strict=True)))
            compare({name: self._sent[name] for name in held}, held)
        self.are_complete = True

    def forget(self) -> None:
        """Record that vLLM has freed its weights; the next weight sync must send all of them."""
        self.are_complete = False


def compare(sent: Mapping[str, int], found: Mapping[str, int]) -> None:
    """Raise EngineError if the hash of a weight differs from the one that was sent."""
    differing = [name for name, value in sent.items() if found[name] != value]
    if differing:
        raise EngineError(
            f"{len(differing)} weights differ between trainer and vLLM after a weight sync, the first is "
            f"{differing[0]}; run again, and report this as a bug if it happens again"
        )
