"""The parity gate at the start of a run: no step is taken while engine and trainer disagree."""

from __future__ import annotations

from fovea.errors import ParityError
from fovea.run.context import Run
from fovea.run.parity import read_parity, summary_line, write_parity
from fovea.run.parity_reading import parity_failure


async def pass_parity_gate(run: Run, version: int) -> None:
    """Measure parity, write parity.json and print one line; ParityError beyond the limit."""
    if run.config.parity.prompts == 0:
        return
    run.progress.stage("comparing the log-probs of engine and trainer")
    reading = await read_parity(run)
    write_parity(run.folder, reading, version)
    run.progress.print(summary_line(reading))
    # a push frees the activations that the engine recorded of these completions
    await run.weight_sync.push(version)
    if not reading.passed:
        raise ParityError(parity_failure(reading))
