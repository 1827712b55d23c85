"""Loss aggregation: the weights by which per-token losses sum to the loss of a batch.

Axes: `B` completions of the global batch, over all micro-batches and processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from fovea.config.algorithm import Aggregation


def sample_weights(mode: Aggregation, lengths_B: Sequence[int], *, max_response_tokens: int) -> NDArray[np.float64]:
    """Weights w [B] such that the batch loss is sum_i w_i * (sum of the token losses of completion i):

        token-mean               sum of token losses / number of tokens
        seq-mean-token-mean      mean over completions of the mean over a completion's tokens
        seq-mean-token-sum       mean over completions of the sum over a completion's tokens
        seq-mean-token-sum-norm  sum of token losses / (number of completions * max_response_tokens)

    A completion without tokens counts as a completion but adds nothing to the loss. Token mean: Yu et al., DAPO, arXiv
    2503.14476; sequence mean: Shao et al., arXiv 2402.03300; constant norm: Liu et al., Dr. GRPO, arXiv 2503.20783.
    """
    # normalised over the global batch, so that the gradient does not depend on the split into micro-batches or ranks
    actions_B = np.array([max(length, 1) for length in lengths_B], dtype=np.float64)
    ones_B = np.ones(len(lengths_B))
    rows = max(len(lengths_B), 1)
    match mode:
        case "token-mean":
            return ones_B / max(sum(lengths_B), 1)
        case "seq-mean-token-mean":
            return ones_B / (rows * actions_B)
        case "seq-mean-token-sum":
            return ones_B / rows
        case "seq-mean-token-sum-norm":
            return ones_B / (rows * max_response_tokens)
    assert_never(mode)
