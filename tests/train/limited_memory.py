"""An update in a process whose address space is limited; as a program, it prints the result of one as JSON."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import torch

from fovea.models.trainable import trainable_parameters
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Metrics
from fovea.utils.checksum import bit_hash
from tests.policies import make_policy, many_groups
from tests.tiny_models import tiny

ROOMY = 100_000
SPARE_MIB = 50
"""Memory that the update may take: as a single micro-batch it needs some 100 MiB."""
NUM_GROUPS = 90


def result(policy: TorchPolicy, metrics: Metrics) -> dict[str, object]:
    """Metrics of an update but for its memory, and a checksum of the weights that it left."""
    trained = trainable_parameters(policy.vlm)
    del metrics["memory/activations_gib"]
    return {**metrics, "weights": [str(int(bit_hash(weight))) for weight in trained.values()]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    policy = make_policy(tiny("qwen3_vl"), max_tokens_per_microbatch=ROOMY)
    policy.update(many_groups(3))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + SPARE_MIB * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    print(json.dumps(result(policy, policy.update(many_groups(NUM_GROUPS)))))
