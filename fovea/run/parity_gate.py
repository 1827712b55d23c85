"""The parity gate at the start of a run and after pushes: no step is taken while engine and trainer disagree."""

from __future__ import annotations

from fovea.errors import ParityError
from fovea.run.context import Run
from fovea.run.parity import read_parity, read_pushed_parity, summary_line, write_parity
from fovea.run.parity_reading import parity_failure


async def pass_parity_gate(run: Run, version: int) -> None:
    """Measure parity, write parity.json and print one line; ParityError beyond the limit."""
    if run.config.parity.prompts == 0:
        return
    run.progress.stage("comparing the log-probs of engine and trainer")
    reading = await read_parity(run, version)
    write_parity(run.folder, reading, version)
    run.progress.print(summary_line(reading))
    # a push frees the activations that the engine recorded of these completions
    await run.weight_sync.push(version)
    if not reading.passed:
        raise ParityError(parity_failure(reading))


async def check_push(run: Run, version: int) -> None:
    """Compare log-probs of two rows after a push to an engine that holds a copy of the weights; ParityError."""
    is_copy = run.weight_sync.metrics.get("transfer/weights_mib", 0.0) > 0
    if not is_copy or not run.taken_push.prompts:
        return
    with run.phases("parity"):
        reading = await read_pushed_parity(run, version)
    if reading.push_violation is not None:
        raise ParityError(f"after the push of version {version}, {parity_failure(reading)}")
