"""What a server must be for training to rest on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fovea.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the trainer needs of every server."""

    dtype: str
    max_model_len: int
    """Tokens of the longest prompt with its completion."""
    max_images: int
    """Images of a prompt."""

    def check(self, url: str, found: Mapping[str, Any]) -> None:
        """Raise EngineError for a server of which something differs (`server_worker.FolderReceiver.fovea_facts`)."""
        again = "start it again, by fovea serve MODEL --for-training DIR"
        if found["logprobs_mode"] != "processed_logprobs" or found["normalizes_pixels"]:
            raise EngineError(f"{url} gives log-probs of another distribution than is trained; {again}")
        if found["dtype"] != self.dtype:
            raise EngineError(
                f"{url} computes in {found['dtype']}, the trainer in {self.dtype}; {again} dtype={self.dtype}"
            )
        for name in ("max_model_len", "max_images"):
            if found[name] < getattr(self, name):
                argument = "max_model_len=" if name == "max_model_len" else "limit_mm_per_prompt.image="
                raise EngineError(
                    f"{url} has {name}={found[name]}, and the settings need {getattr(self, name)}; {again} "
                    f"{argument}{getattr(self, name)}"
                )
