"""Files of a run's answers to held-out rows: answers/NAME.jsonl in the run folder, one JSON object per row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fovea.evaluation.answer import turns_to_json
from fovea.evaluation.evaluator import AnsweredRow
from fovea.utils.files import json_number, write_atomically

ANSWERS_FOLDER = "answers"


def write_answers(run_dir: Path, name: str, rows: Sequence[AnsweredRow]) -> None:
    """Write the greedy answers of one evaluation, such as `dev-step-000050`, over those of an earlier attempt."""
    lines = (json.dumps(_to_json(row), allow_nan=False) + "\n" for row in rows)
    write_atomically(run_dir / ANSWERS_FOLDER / f"{name}.jsonl", "".join(lines).encode("ascii"))


def _to_json(row: AnsweredRow) -> dict[str, object]:
    answer = row.answers[0]
    return {
        "id": row.id,
        "index": row.index,
        "kind": row.kind,
        "image_type": row.image_type,
        "truth": row.truth,
        "answer": answer.text,
        "reward": json_number(answer.reward),
        "accuracy": json_number(answer.accuracy),
        "parts": {name: json_number(value) for name, value in answer.parts.items()},
        "finish": answer.finish,
        **turns_to_json(answer),
    }
