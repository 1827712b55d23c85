"""One decoding step of all rows, from the tokens drawn last to the logits of the next.

Axes: `B` live completions, `W` vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from fovea.models.decoder import Attend, DecoderShape, decode
from fovea.models.vlm import VLM
from fovea.rollout.embedded.batch import Step
from fovea.rollout.embedded.cache import Cache
from fovea.rollout.embedded.cuda_graphs import Capture, DecodeGraphs, GraphInputs
from fovea.rollout.embedded.paged_cache import PagedCache
from fovea.rollout.embedded.weights import TextWeights


class Stepper:
    """Runs steps operator by operator."""

    def __init__(self, vlm: VLM, weights: TextWeights, shape: DecoderShape, cache: Cache) -> None:
        self._vlm, self._weights, self._shape, self._cache = vlm, weights, shape, cache

    def __call__(self, step: Step) -> Tensor:
        """Logits [B, W] in float32."""
        attend = self._cache.step(step.stored_B, step.longest, step.level)
        return self.logits(step.token_B, step.position_B, attend)

    def logits(self, token_B: Tensor, position_B: Tensor, attend: Attend) -> Tensor:
        hidden_BE = self._weights.embed[token_B]
        rope = self._vlm.rope(position_B.expand(3, -1), hidden_BE)
        return self._weights.logits(decode(self._weights.decoder, self._shape, hidden_BE, rope, attend))


class GraphStepper(Stepper):
    """Runs steps as captured graphs over a paged cache, as long as weights and pool stay where they are."""

    def __init__(
        self, vlm: VLM, weights: TextWeights, shape: DecoderShape, cache: PagedCache, capture: Capture
    ) -> None:
        super().__init__(vlm, weights, shape, cache)
        self._pages = cache
        self._graphs = DecodeGraphs(self._run, capture)

    def __call__(self, step: Step) -> Tensor:
        return self._graphs(
            GraphInputs(
                token_B=step.token_B,
                position_B=step.position_B,
                tokens_B=self._pages.tokens(step.stored_B),
                table_BX=self._pages.table_BX,
            )
        )

    def _run(self, inputs: GraphInputs) -> Tensor:
        attend = self._pages.attention(inputs.table_BX, inputs.tokens_B)
        return self.logits(inputs.token_B, inputs.position_B, attend)
