"""The policy's LoRA adapter in vLLM, beside the weights that it adds to: pushed alone, and replaced in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from fovea.config.run import Lora
from fovea.errors import EngineError
from fovea.rollout.vllm.worker import ADAPTER_ID
from fovea.types import Shape

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for (`vllm.config.lora.MaxLoRARanks`)."""
REQUEST = LoRARequest("policy", ADAPTER_ID, "in memory")
"""What a request is made with for vLLM to use the adapter; it is never read from that path."""


class VllmAdapter:
    """Loads the matrices of an adapter into vLLM, once all of them have come."""

    def __init__(self, llm: LLMEngine, settings: Lora) -> None:
        self._llm = llm
        self._settings = settings
        self.is_complete = False
        """Whether vLLM holds all of the adapter of the last push."""
        self._tensors: dict[str, Tensor] = {}

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise EngineError unless these are the matrices A and B of some layers."""
        ends = (".lora_A.default.weight", ".lora_B.default.weight")
        layers = [{name.removesuffix(end) for name in shapes if name.endswith(end)} for end in ends]
        other = [name for name in shapes if not name.endswith(ends)]
        halves = sorted(layers[0] ^ layers[1]) + other
        if halves or not shapes:
            raise EngineError(
                f"vLLM's adapter needs the matrices A and B of every layer, and {len(halves)} layers have one of them, "
                f"first {[*halves, 'none'][0]}; both must open the same model: compare model.path on both sides"
            )

    def begin(self) -> None:
        """Prepare for matrices that `check` has accepted."""
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
                    f"vLLM holds {held} of the {sent} matrices of the adapter as they were sent; set "
                    "rollout.engine.enable_lora=false, and it gets merged weights"
                )
        self.is_complete, self._tensors = True, {}

    def forget(self) -> None:
        """Take over that vLLM has freed it."""
        self.is_complete = False


def room_for(rank: int) -> int:
    """The smallest rank that vLLM makes room for and this one fits into."""
    return next(each for each in RANKS if each >= rank)
