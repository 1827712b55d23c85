"""A push of weights as files, in a folder that the trainer and the servers see."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fovea.errors import EngineError
from fovea.utils.checksum import read_hashes, value_hash

PUSH_NAME = re.compile(r"push-[0-9a-f]{16}")
"""The name of a push's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """All weights of one version."""

    name: str
    """Its folder's, different for each push of all runs: a version may come again."""
    hashes: dict[str, int] = field(default_factory=dict)
    """Hashes of the values in the servers' type, by the names of checkpoints."""
    hashes_there: dict[str, int] = field(default_factory=dict)
    """The same by vLLM's names."""


class PushFolder:
    """Writes pushes, a file for each bucket, and keeps the last one."""

    def __init__(self, root: Path, dtype: torch.dtype, vllm_name: Callable[[str], str]) -> None:
        self._root = root
        self._dtype = dtype
        self._vllm_name = vllm_name
        self._push: Push | None = None
        self._older: list[Push] = []
        """Pushes before the last one, of which those that broke off were never loaded."""
        self._num_files = 0

    def begin(self) -> None:
        """Make the folder of another push; EngineError where that is not possible."""
        push = Push(name=f"push-{secrets.token_hex(8)}")
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            (self._root / push.name).mkdir(mode=0o755)
        except OSError as error:
            raise EngineError(f"rollout.engine.weights_dir={self._root}: {error.strerror}; correct it") from error
        if self._push is not None:
            self._older.append(self._push)
        self._push, self._num_files = push, 0

    def write(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Write some weights to a file of their own."""
        assert self._push is not None, "no push has begun"
        held = {name: tensor.detach().to(self._dtype).cpu().contiguous() for name, tensor in bucket}
        save_file(held, self._root / self._push.name / f"{self._num_files:05d}.safetensors")
        self._num_files += 1
        (hashes,) = read_hashes([value_hash(tensor, self._dtype) for tensor in held.values()])
        for name, bits in zip(held, hashes, strict=True):
            self._push.hashes[name] = bits
            self._push.hashes_there[self._vllm_name(name)] = bits

    def finish(self) -> Push:
        """The push that is complete."""
        assert self._push is not None, "no push has begun"
        return self._push

    def delete_older(self) -> None:
        """Delete the pushes before the last one, which no server needs any more."""
        while self._older:
            shutil.rmtree(self._root / self._older.pop().name, ignore_errors=True)

    def delete(self) -> None:
        """Delete what is left."""
        self.delete_older()
        if self._push is not None:
            shutil.rmtree(self._root / self._push.name, ignore_errors=True)
            self._push = None
