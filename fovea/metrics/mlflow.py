"""MLflow as a tracker, at MLFLOW_TRACKING_URI; the only file that imports mlflow (extra: mlflow)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from fovea.metrics.tracker import TrackedSample, plain_name, readable
from fovea.utils.installing import pip_install
from fovea_gym.errors import ConfigError, MissingExtraError

try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"log.mlflow_experiment is set, but {error.name} is not installed; {pip_install('mlflow')}, or set "
        "log.mlflow_experiment=null"
    ) from error

RUN_TAG = "fovea_run_id"
PARAMS_PER_REQUEST, METRICS_PER_REQUEST = 100, 1000
"""Limits of one request (`mlflow.utils.validation`)."""
MAX_PARAM_LENGTH = 6000
"""Longest value of a parameter, in characters (also from `mlflow.utils.validation`)."""


class MlflowTracker:
    """An MLflow run tagged with Fovea's run id; an existing run with that tag is continued.

    Non-finite metrics are left out, since MLflow stores infinity as the largest float, which flattens a curve.
    """

    def __init__(self, *, experiment: str, run_name: str, run_id: str, goes_on: bool) -> None:
        """Find or create the run; ConfigError if it `goes_on` but does not exist."""
        self._client = _client()
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        runs = self._client.search_runs([experiment_id], filter_string=f"tags.{RUN_TAG} = '{run_id}'")
        if goes_on and not runs:
            raise ConfigError(
                f"log.mlflow_experiment={experiment}: {self._client.tracking_uri} has no run for this folder, which "
                "has sent steps; set MLFLOW_TRACKING_URI as before, or delete mlflow_run.json to send all steps to a "
                "new run"
            )
        tags = {RUN_TAG: run_id}
        run = runs[0] if runs else self._client.create_run(experiment_id, run_name=run_name, tags=tags)
        self._run_id: str = run.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")

    def begin(self, settings: Mapping[str, object]) -> None:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in _leaves(settings)}
        params = [Param(plain_name(key), readable(text)[:MAX_PARAM_LENGTH]) for key, text in texts.items()]
        for start in range(0, len(params), PARAMS_PER_REQUEST):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_PER_REQUEST])

    def write(self, step: int, metrics: Mapping[str, float], samples: Sequence[TrackedSample]) -> None:
        # images first: if they are sent again after a failure they replace themselves, which metrics would not do
        for number, sample in enumerate(samples, start=1):
            place = f"samples/step-{step:06d}/{number}"
            self._client.log_image(self._run_id, sample.image, artifact_file=f"{place}.png")
            self._client.log_text(self._run_id, sample.caption, f"{place}.txt")
        now_ms = int(time.time() * 1000)
        sent = [
            Metric(plain_name(name), value, now_ms, step) for name, value in metrics.items() if math.isfinite(value)
        ]
        for start in range(0, len(sent), METRICS_PER_REQUEST):
            self._client.log_batch(self._run_id, metrics=sent[start : start + METRICS_PER_REQUEST])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _client() -> MlflowClient:
    """A client for the store at MLFLOW_TRACKING_URI; MissingExtraError if the package for its database is missing."""
    try:
        return MlflowClient()
    except MlflowException as error:
        if find_spec("sqlalchemy"):
            raise
        raise MissingExtraError(
            "log.mlflow_experiment is set, but sqlalchemy, which MLflow's own database needs, is not installed; "
            f"{pip_install('mlflow')}, or set MLFLOW_TRACKING_URI to a server"
        ) from error


def _leaves(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    """The values in nested mappings, by dotted key."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
