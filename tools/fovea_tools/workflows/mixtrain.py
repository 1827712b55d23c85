"""The workflows vlm-rl-training and vlm-rl-eval as MixFlow classes of the mixtrain SDK (extra: mixtrain).

The folder workflows/mixtrain contains the files for `mixtrain workflow create`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from mixtrain import Checkpoint, Dataset, Eval, MixFlow, Sandbox
from pydantic import TypeAdapter

from fovea.api.targets import export
from fovea.metrics.log import read_metrics
from fovea.report.summary import FiguresAlongARun
from fovea_gym.benchmarks.estimates import Estimate
from fovea_gym.settings.base import Section
from fovea_gym.utils.stored import as_json
from fovea_tools.workflows.inputs import EvaluationInputs, TrainingInputs, check_names, checked
from fovea_tools.workflows.training import TrainingOutputs, evaluate, train

_ESTIMATE = TypeAdapter(Estimate)
Run = TypeVar("Run", bound=Callable[..., dict[str, Any]])
Flow = TypeVar("Flow", bound=type[MixFlow])

SAVE_RESULTS = inspect.Parameter("save_results", inspect.Parameter.KEYWORD_ONLY, default=True, annotation=bool)
"""An input that only this training has: save its results in the workspace."""
IMAGE = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
"""Container image; the one on the published page has torch 2.6, which is too old for Fovea."""
VOLUME = Path("/data")
"""Path at which the SDK mounts the workspace's volume in a sandbox; the volume outlives the sandbox."""
MAX_NAME_LENGTH = 63
"""Longest name that a workspace allows."""


def takes(record: type[Section], *own: inspect.Parameter, **other_types: object) -> Callable[[Run], Run]:
    """Give `run` the inputs of a record as parameters; the SDK reads names, types and defaults from its signature."""

    def with_signature(run: Run) -> Run:
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.is_required() else field.get_default(),
                annotation=other_types.get(name, field.annotation),
            )
            for name, field in record.model_fields.items()
        ]
        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([me, *parameters, *own])  # type: ignore[attr-defined]
        return run

    return with_signature


def names_checked(record: type[Section], *own: str) -> Callable[[Flow], Flow]:
    """Check the names of inputs before the SDK does, since its error does not suggest the right name."""

    def with_check(flow: Flow) -> Flow:
        run_of_sdk = flow.run

        @functools.wraps(run_of_sdk)
        def run(self: MixFlow, inputs: Mapping[str, Any] | None = None, **more: Any) -> Any:
            given = {**(inputs or {}), **more}
            check_names(record, given, own)
            return run_of_sdk(self, given)

        flow.run = run
        return flow

    return with_check


@names_checked(TrainingInputs, "save_results")
class VLMRLTraining(MixFlow):  # type: ignore[misc]
    """Train a vision-language model with PPO in an environment with verifiable rewards."""

    _sandbox = Sandbox(image=IMAGE, gpu="A100", gpu_per_node=4, timeout=14400)

    def setup(self, save_results: bool = True) -> None:
        """Check before training that its results can be saved."""
        if save_results:
            _ = self.mix.workspace_name

    @takes(TrainingInputs, SAVE_RESULTS, env_dataset=Dataset | str | None)
    def run(self, *, save_results: bool, env_dataset: Dataset | str | None, **given: Any) -> dict[str, Any]:
        """Train, and return the outputs of the workflow.

        `env_dataset` is a Dataset, or the name of one in the workspace. With `save_results` the run folder and the
        exported model (`checkpoint`) go to the workspace's volume, the metrics become a Dataset of the workspace, and
        the evaluation becomes an Eval over a Dataset of the held-out figures. Without it, the outputs have a local
        Dataset and the figures.
        """
        inputs = checked(TrainingInputs, _given(given))
        outputs = train(on_volume(inputs) if save_results else inputs, self._rows(env_dataset))
        metrics = Dataset.from_pylist(read_metrics(outputs.run), name=_name("metrics", outputs))
        results = outputs.to_json() | {"metrics_dataset": metrics}
        return results | self._saved(outputs, metrics) if save_results else results

    def _saved(self, outputs: TrainingOutputs, metrics: Any) -> dict[str, Any]:
        """Save the results in the workspace, and return those that are workspace objects."""
        saved = {
            "checkpoint": _checkpoint(outputs),
            "metrics_dataset": metrics.save(_name("metrics", outputs), client=self.mix),
        }
        if outputs.evaluation is None:
            return saved
        figures = Dataset.from_pylist(list(figure_rows(outputs.evaluation)))
        figures = figures.save(_name("held-out", outputs), client=self.mix)
        name, columns = _name("eval", outputs), figures.schema.names
        return saved | {"evaluation": Eval.from_dataset(figures, name, columns=columns, client=self.mix)}

    def _rows(self, env_dataset: Dataset | str | None) -> list[dict[str, Any]] | None:
        if env_dataset is None:
            return None
        dataset = Dataset(env_dataset, client=self.mix) if isinstance(env_dataset, str) else env_dataset
        rows: list[dict[str, Any]] = dataset.to_pylist(load_files="bytes")
        return rows


@names_checked(EvaluationInputs)
class VLMRLEval(MixFlow):  # type: ignore[misc]
    """Compare a trained vision-language model with a baseline on the same rows."""

    _sandbox = Sandbox(image=IMAGE, gpu="A100", timeout=14400)

    @takes(EvaluationInputs)
    def run(self, **given: Any) -> dict[str, Any]:
        """Evaluate, and return the outputs of the workflow."""
        return evaluate(checked(EvaluationInputs, _given(given))).to_json()


def _given(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs without those that the SDK filled in as None because they were omitted."""
    return {name: value for name, value in inputs.items() if value is not None}


def on_volume(inputs: TrainingInputs) -> TrainingInputs:
    """The inputs with a run folder on the workspace's volume, unless they set run_dir or resume a run."""
    if not VOLUME.is_dir() or inputs.resume_checkpoint is not None or "run_dir" in inputs.settings:
        return inputs
    given = inputs.model_dump(exclude_unset=True)
    return TrainingInputs(**given | {"settings": {**inputs.settings, "run_dir": str(VOLUME / "fovea/{name}-{time}")}})


def _checkpoint(outputs: TrainingOutputs) -> Checkpoint | None:
    """The trained model on the volume in transformers' format, for `Model.create`; None without a mounted volume."""
    if not VOLUME.is_dir():
        return None
    with TemporaryDirectory() as folder:
        # trust: the run was just trained here, so its settings are the user's
        exported = export(outputs.trained_model, Path(folder) / "model", trust=True).folder
        target = VOLUME / "fovea/models" / _name("model", outputs)
        target.parent.mkdir(parents=True, exist_ok=True)
        return Checkpoint.from_dir(str(exported), str(target), task="image-text-to-text", source_run=outputs.run.name)


def figure_rows(evaluation: FiguresAlongARun) -> Iterator[dict[str, object]]:
    """Yield a row for each held-out figure of each stage of a run, with its 95 % interval."""
    for stage in ("before", "warmup", "final"):
        figures = evaluation[stage]
        if figures is None:
            continue
        reward = {} if figures.reward is None else {"reward": figures.reward}
        for name, estimate in {"accuracy": figures.accuracy, **reward, **figures.by_type}.items():
            yield {"stage": stage, "figure": name, **as_json(_ESTIMATE, estimate)}


def _name(kind: str, outputs: TrainingOutputs) -> str:
    """A name for the workspace that contains the run's; the run's folder ends with its start time."""
    start = f"vlm-rl-{kind}-step-{outputs.total_steps}-"
    run = re.sub(r"[^a-z0-9_-]+", "-", outputs.run.name.lower())
    return start + run[len(start) - MAX_NAME_LENGTH :]
