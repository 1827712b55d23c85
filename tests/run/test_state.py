"""What a checkpoint keeps of a run's progress besides the weights."""

from __future__ import annotations

import json

from fovea.evaluation.controls import Searched, SharedImages
from fovea.run.microbatches import MicrobatchTokens
from fovea.run.state import TrainState
from fovea.types import Evaluation


def test_progress_survives_its_json_form() -> None:
    before = Evaluation(accuracies={"count": (1.0, 0.0, 0.5), "colour": ()}, num_unscored=2)
    state = TrainState(
        step=7,
        kl_coef=0.02,
        before=before,
        after_warmup=None,
        warmup_seconds=3.0,
        rl_seconds=5.0,
        microbatches=MicrobatchTokens(setting=1000, limit=250),
        shared_images=SharedImages(shared=4, test=Searched(rows=5, of=5), train=Searched(rows=6, of=60)),
        started=0.0,
    )
    saved = json.loads(json.dumps(state.to_json()))
    loaded = TrainState.from_json(7, saved, started=0.0)
    assert loaded.before == before
    assert loaded.after_warmup is None
    assert loaded.microbatches == state.microbatches
    assert loaded.to_json() | {"total_seconds": 0.0} == state.to_json() | {"total_seconds": 0.0}
    assert loaded.earlier_seconds == saved["total_seconds"] > 0
