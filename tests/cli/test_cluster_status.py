"""What `fovea cluster status` says of a head node that never has a status; a real cluster has one within seconds."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fovea.cli import cluster


def test_a_cluster_without_a_status_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "STATUS_SECONDS", 0.0)
    monkeypatch.setattr(cluster, "use_token", lambda: None)
    monkeypatch.setattr(cluster, "run_ray", lambda *_: f"{cluster.NO_STATUS_YET}\n")
    ended = CliRunner().invoke(cluster.app, ["status"])
    assert ended.exit_code == 3
    assert "the cluster gave no status for 0 s" in ended.stderr
