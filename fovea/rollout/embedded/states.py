"""States of delta nets in a rollout; they accompany the KV cache of the attention layers.

A prompt is run once; its states are then copied for each of its completions, which advance them token by token. The
rows are the rows of the KV cache, in the same order.

Axes: `B` rows of the decode batch, `P` prompts of a prefill, `N` tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fovea.models.delta_rule import DeltaInputs, DeltaShape, DeltaState, Scan, delta_rule, fastest_functions
from fovea.models.shared_prefix.layout import shared_prefix_layout
from fovea.rollout.embedded.cache import Moves, TokenSpan
from fovea.rollout.embedded.requests import KeptKeys


class DeltaStates:
    """The states of each delta net, [B, ...] for rows and [P, ...] for prompts that are being prefilled."""

    def __init__(self, shape: DeltaShape, like: Tensor) -> None:
        """The states are on the device of `like`; the convolution tails also have its dtype."""
        self._shape, self._device = shape, like.device
        self._functions = fastest_functions(shape, like.device, like.dtype)
        self._empty = DeltaState.zeros(1, shape, like)
        self.clear()

    def clear(self) -> None:
        """Drop all states."""
        none = self._select(self._empty, [])
        self._rows = [none] * sum(self._shape.is_delta)
        self._prompts: list[DeltaState] = []

    def begin(self, kept: Sequence[KeptKeys | None]) -> None:
        """Start the prefill of prompts; one with kept earlier turns starts from the states at their end."""
        self._prompts = [
            DeltaState.cat([self._empty if each is None else each.states[layer] for each in kept])
            for layer in range(len(self._rows))
        ]

    def prefill(self, spans: Sequence[TokenSpan], first: int) -> Scan:
        """Return the delta rule of a pass over these spans; `first` is the index of the first prompt in the prefill."""
        layout = shared_prefix_layout([span.end - span.start for span in spans], [[] for _ in spans]).to(self._device)
        prompts = torch.tensor([span.prompt - first for span in spans], device=self._device)

        def scan(layer: int, inputs: DeltaInputs) -> Tensor:
            states = self._prompts[layer]
            rows = inputs.rows(layout.prompt_index_PL, layout.prompt_valid_PL)
            out, after = delta_rule(rows, states.select(prompts), self._shape, self._functions)
            states.tail_RKC[prompts], states.memory_RVDF[prompts] = after.tail_RKC, after.memory_RVDF
            return out.flatten(0, 1)[layout.return_index_N]

        return scan

    def branch(self, completions: Sequence[int]) -> None:
        """End a prefill: append one copy of each prompt's states per completion."""
        prompt_of_B = [prompt for prompt, count in enumerate(completions) for _ in range(count)]
        self._rows = [
            DeltaState.cat([rows, self._select(prompts, prompt_of_B)])
            for rows, prompts in zip(self._rows, self._prompts, strict=True)
        ]
        self._prompts = []

    def step(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """Apply the delta rule of a decode step (a `Scan`), which advances the states of all rows by one token."""
        out, self._rows[layer] = delta_rule(inputs.steps(), self._rows[layer], self._shape, self._functions)
        return out.squeeze(1)

    def remove(self, moves: Moves) -> None:
        """Compact the rows in the same way as the KV cache."""
        order = list(range(len(self._rows[0].tail_RKC)))
        moves.in_list(order)
        self._rows = [self._select(rows, order) for rows in self._rows]

    def copy_row(self, row: int) -> list[DeltaState]:
        """Copy the states of a row, one per layer."""
        return [self._select(rows, [row]) for rows in self._rows]

    def _select(self, states: DeltaState, rows: Sequence[int]) -> DeltaState:
        return states.select(torch.tensor(rows, dtype=torch.long, device=self._device))
