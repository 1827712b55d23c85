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
from fovea.models.transfer import to_device
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
        none = DeltaState(self._empty.tail_RKC[:0], self._empty.memory_RVDF[:0])
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
        prompts = to_device(torch.tensor([span.prompt - first for span in spans]), self._device)

        def scan(layer: int, inputs: DeltaInputs) -> Tensor:
            states = self._prompts[layer]
            rows = inputs.rows(layout.prompt_index_PL, layout.prompt_valid_PL)
            out, after = delta_rule(rows, states.select(prompts), self._shape, self._functions)
            states.tail_RKC[prompts], states.memory_RVDF[prompts] = after.tail_RKC, after.memory_RVDF
            return out.flatten(0, 1)[layout.return_index_N]

        return scan

    def branch(self, completions: Sequence[int]) -> None:
        """End a prefill: append one copy of each prompt's states per completion."""
        prompt_of_B = torch.arange(len(completions)).repeat_interleave(torch.tensor(completions))
        prompt_of_B = to_device(prompt_of_B, self._device)
        # layer by layer, since the states of all layers would need their memory twice
        for layer, prompts in enumerate(self._prompts):
            self._rows[layer] = DeltaState.cat([self._rows[layer], prompts.select(prompt_of_B)])
        self._prompts = []

    def step(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """Apply the delta rule of a decode step (a `Scan`), which advances the states of all rows by one token."""
        out, self._rows[layer] = delta_rule(inputs.steps(), self._rows[layer], self._shape, self._functions)
        return out.squeeze(1)

    def remove(self, moves: Moves) -> None:
        """Compact the rows in the same way as the KV cache."""
        if not moves.count:
            self.clear()  # a view of no rows would hold the memory of all
            return
        sources, targets = moves.index(self._device)
        for layer, rows in enumerate(self._rows):
            kept = []
            for states in (rows.tail_RKC, rows.memory_RVDF):
                # safe in place, because sources and targets never overlap
                states[targets] = states[sources]
                kept.append(states[: moves.count])
            self._rows[layer] = DeltaState(*kept)

    def copy_row(self, row: int) -> list[DeltaState]:
        """Copy the states of a row, one per layer."""
        return [
            DeltaState(rows.tail_RKC[row : row + 1].clone(), rows.memory_RVDF[row : row + 1].clone())
            for rows in self._rows
        ]
