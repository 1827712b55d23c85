"""Interface of a trainable network: packed rows in, log-probs, entropies and values of actions out.

Axes: `A` actions of a row, `U` actions of its unequal completions, `E` width of the language model, `K` banned ids.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fovea.models.decoder import ExpertLoad
from fovea.models.families.registry import family_of
from fovea.models.head_gradients import LossGradients
from fovea.models.heads import ValueHead
from fovea.models.modules import config_of, language_model, projector_modules, vision_modules
from fovea.models.shared_prefix.layout import PackedRow
from fovea.models.token_logprobs import TokenScores, token_scores


class PolicyNetwork(nn.Module):
    """A transformers network with an optional value head. Training enters it through `forward` only.

    Subclasses differ in `action_states`: `models.vlm` runs packed rows as they are, `models.plain` unpacks them for
    transformers' own forward.
    """

    expert_load: ExpertLoad
    """Counts of passes in training mode on the fast path; empty for a model without experts."""
    banned_K: Tensor
    """`banned_ids` on the device; an engine in this process draws with the same tensor."""
    dtype: torch.dtype
    """Type of the weights in a pass; shards of those that are trained are float32."""

    def __init__(
        self, network: PreTrainedModel, banned_ids: Sequence[int], value_head: ValueHead | None = None
    ) -> None:
        """`banned_ids` are those of the model's processor (`Processor.banned_ids`)."""
        super().__init__()
        self.value_head = value_head
        self.network = network
        self.dtype = self._embedding.weight.dtype
        self.family = family_of(config_of(network), str(network.name_or_path))
        self.expert_load = ExpertLoad()
        self.banned_ids = tuple(banned_ids)
        # a buffer, which moves to the device with the weights; derived from the tokenizer, and so in no checkpoint
        self.register_buffer("banned_K", torch.tensor(self.banned_ids, dtype=torch.long), persistent=False)

    def forward(
        self, row: PackedRow, *, temperature: float, chunk_tokens: int, loss_gradients: LossGradients | None = None
    ) -> TokenScores:
        """Log-probs and entropies [A] of what is sampled at `temperature`, and values [A] if there is a value head.

        Logits are computed for `chunk_tokens` actions at a time; `loss_gradients` are by actions [U] of unequal
        completions, as for `token_scores`.
        """
        hidden_UE = self.action_states(row)
        head: Any = self.network.get_output_embeddings()
        scores = token_scores(
            hidden_UE,
            head.weight,
            row.target_ids_U,
            self.banned_K,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            loss_gradients=loss_gradients,
        )
        if self.value_head is not None:
            scores = replace(scores, values_A=self.value_head(hidden_UE))
        return scores.at(row.computed_A)

    @abstractmethod
    def action_states(self, row: PackedRow) -> Tensor:
        """Last hidden states [U, E], after the final norm, from which the actions are predicted."""

    @property
    def text_config(self) -> Any:
        """transformers' config of the language model."""
        return config_of(language_model(self.network))

    @property
    def device(self) -> torch.device:
        """Device of the passes, also where the weights are in the host's memory between them."""
        return self.banned_K.device

    @property
    def vocabulary_size(self) -> int:
        """Logits of a token: rows of the embedding."""
        size: int = self._embedding.num_embeddings
        return size

    @property
    def logits_bytes_per_token(self) -> int:
        """Bytes of the float32 logits of one token."""
        return 4 * self.vocabulary_size

    @property
    def trains_vision(self) -> bool:
        """True if any parameter of the vision tower or its projector is trained."""
        return any(parameter.requires_grad for parameter in _parameters(vision_modules(self.network)))

    @property
    def trains_tower(self) -> bool:
        """True if any parameter of the vision tower is trained that is not the projector's."""
        projector = set(_parameters(projector_modules(self.network)))
        tower = set(_parameters(vision_modules(self.network))) - projector
        return any(parameter.requires_grad for parameter in tower)

    @property
    def _embedding(self) -> Any:
        return self.network.get_input_embeddings()


def _parameters(modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    return (parameter for module in modules for parameter in module.parameters())
