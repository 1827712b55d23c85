"""How the losses of single actions become the loss of a batch.

Axes: `B` completions of the whole batch: of all its micro-batches and all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from fovea.config.algorithm import Aggregation


def sample_weights(mode: Aggregation, lengths_B: Sequence[int], *, max_response_tokens: int) -> NDArray[np.float64]:
    """[B], w with loss = sum over completions i of w_i times the sum of its actions' losses:

        token-mean               sum of all losses / all actions
        seq-mean-token-mean      mean over completions of the mean over a completion's actions
        seq-mean-token-sum       mean over completions of the sum over a completion's actions
        seq-mean-token-sum-norm  sum of all losses / (completions * max_response_tokens)

    As the weights are of the whole batch, the gradient does not depend on how it is split. A completion without
    actions counts as one of the completions and adds nothing. Token mean: Yu et al., DAPO, arXiv 2503.14476; sequence
    mean: Shao et al., arXiv 2402.03300; the constant norm: Liu et al., Dr. GRPO, arXiv 2503.20783.
    """
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
