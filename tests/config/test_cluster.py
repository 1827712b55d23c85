from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fovea.cluster.placement import Placement
from fovea.config.sections import Cluster
from fovea.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_nodes": 2}, "cluster.num_nodes=2 needs Ray"),
        ({"rollout_gpus": 1}, "cluster.rollout_gpus=1 are only to generate"),
        ({"placement": "disaggregated"}, "cluster.placement=disaggregated needs GPUs that only generate"),
        ({"placement": "hybrid"}, "cluster.placement=hybrid needs GPUs that only generate"),
        (
            {"placement": "hybrid", "rollout_gpus": 4, "num_nodes": 2, "gpus_per_node": 2},
            "cluster.rollout_gpus=4 leaves none of 4 GPUs to train",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Cluster(**settings)


def test_the_last_workers_hold_an_engine_alone() -> None:
    workers = [0, 1, 2, 3]
    held = {
        cluster.placement: (placement.learners(workers), placement.engines(workers))
        for cluster in (
            Cluster(),
            Cluster(placement="disaggregated", rollout_gpus=1),
            Cluster(placement="hybrid", rollout_gpus=1),
        )
        for placement in [Placement.of(cluster, len(workers))]
    }
    assert held == {
        "collocated": (workers, workers),
        "disaggregated": ([0, 1, 2], [3]),
        "hybrid": ([0, 1, 2], workers),
    }


def test_replicas_are_of_learners_alone_and_of_equal_size() -> None:
    cluster = Cluster(placement="disaggregated", rollout_gpus=2)
    assert Placement.of(cluster, 8, replicas=3).replicas == 3
    with pytest.raises(ConfigError, match=r"replicas=4 does not divide .* processes, 6; set it to 1, 2, 3 or 6$"):
        Placement.of(cluster, 8, replicas=4)


def test_processes_that_would_all_generate_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are 1 processes, so that none trains"):
        Placement.of(Cluster(placement="disaggregated", rollout_gpus=1), 1)
