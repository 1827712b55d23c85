"""The defaults of published algorithms, by `algorithm.name`."""

from __future__ import annotations

from fovea.config.base import Tree

DEFAULTS_OF: dict[str, Tree] = {
    # DeepSeekMath, arXiv 2402.03300, with the token mean and without the KL term that most runs have left behind
    "grpo": {},
    # Liu et al., arXiv 2503.20783. No entropy bonus here and in rloo: beside advantages that are not divided by their
    # deviation, one that suits grpo outweighs the reward
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "seq-mean-token-sum-norm", "kl": None, "entropy_coef": 0.0},
    # Yu et al., arXiv 2503.14476: a buffer of 4,096 of 20,480 tokens
    "dapo": {
        "aggregation": "token-mean",
        "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.28},
        "kl": None,
        "dynamic_sampling": True,
        "overlong": {"buffer_frac": 0.2},
    },
    # Zheng et al., arXiv 2507.18071, section 5.1
    "gspo": {"loss": "gspo", "aggregation": "seq-mean-token-mean"},
    # Ahmadian et al., arXiv 2402.14740: one action a completion, the KL in its reward
    "rloo": {
        "advantage": "rloo",
        "aggregation": "seq-mean-token-sum",
        "kl": {"name": "reward", "coef": 0.03},
        "entropy_coef": 0.0,
    },
    # Hu et al., arXiv 2501.03262: the KL in the reward
    "reinforce++": {"advantage": "reinforce++", "kl": {"name": "reward", "coef": 0.01}},
    # the same paper's variant for several answers per prompt: k2 in the loss
    "reinforce++_baseline": {
        "advantage": "reinforce++_baseline",
        "kl": {"name": "loss", "coef": 0.01, "estimator": "k2"},
    },
    # Schulman et al., arXiv 1707.06347 and 1506.02438; the numbers are those of vlm-gym, but for the limit on the KL:
    # four passes at a rate that was chosen for one wreck a policy without it (docs/log.md)
    "ppo": {
        "advantage": {"name": "gae", "gamma": 0.99, "gae_lambda": 0.95},
        "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.2},
        "ppo_epochs": 4,
        "max_policy_kl": 0.03,
        "entropy_coef": 0.01,
    },
}
"""The settings of `algorithm` that a name sets, unless they stand beside it."""
