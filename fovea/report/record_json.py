"""Sample records as JSON, of this version and of those before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from fovea.evaluation.answer import SampledAnswer
from fovea.report.images import image_path
from fovea.report.records import (
    GroupSummary,
    RecordedAnswer,
    RecordedImage,
    RecordedMessage,
    RecordedTurn,
    SampleRecord,
    TokenTrace,
)
from fovea.types import EpisodeEnd
from fovea_gym.types import FinishReason, Mark
from fovea_gym.utils.files import from_json_number, json_number

Json = Mapping[str, Any]
_END: Mapping[object, EpisodeEnd] = {end: end for end in get_args(EpisodeEnd)}


def record_to_json(record: SampleRecord) -> dict[str, Any]:
    """A record as a JSON object; null stands for numbers that are not finite."""
    return {
        "id": record.id,
        "kind": record.kind,
        "prompt": record.prompt,
        "truth": record.truth,
        "messages": list(map(_message_to_json, record.messages)),
        "answers": list(map(answer_to_json, record.answers)),
    }


def record_from_json(row: Json) -> SampleRecord:
    """The record of a JSON object; KeyError, TypeError, ValueError or AttributeError where it holds none."""
    return SampleRecord(
        id=str(row["id"]),
        kind=str(row["kind"]),
        prompt=str(row["prompt"]),
        truth=str(row["truth"]),
        messages=tuple(map(_message_from_json, row["messages"])),
        answers=tuple(map(_answer_from_json, row["answers"])),
    )


def summary_to_json(summary: GroupSummary) -> dict[str, Any]:
    """A summary as a JSON object, for the index of a run's samples."""
    return {
        "kind": summary.kind,
        "row": summary.row,
        "rewards": _numbers_to_json(summary.rewards),
        "truncated": summary.num_truncated,
    }


def summary_from_json(row: Json) -> GroupSummary:
    """The summary of a JSON object; errors as of `record_from_json`."""
    return GroupSummary(
        kind=str(row["kind"]),
        row=str(row["row"]),
        rewards=_numbers_from_json(row["rewards"]),
        num_truncated=int(row["truncated"]),
    )


def mark_to_json(mark: Mark) -> dict[str, Any]:
    """A box or a point as a JSON object."""
    return {"image": mark.image, "xy": list(mark.xy), "label": mark.label}


def _mark_from_json(row: Json) -> Mark:
    return Mark(image=int(row["image"]), xy=tuple(map(float, row["xy"])), label=str(row["label"]))


def _message_to_json(message: RecordedMessage) -> dict[str, Any]:
    parts = [part if isinstance(part, str) else {"image": part.name, "frame": part.frame} for part in message.parts]
    return {"role": message.role, "parts": parts, "tool": message.tool, "failed": message.failed}


def _message_from_json(row: Json) -> RecordedMessage:
    parts = tuple(part if isinstance(part, str) else _image_from_json(part) for part in row["parts"])
    return RecordedMessage(role=str(row["role"]), parts=parts, tool=str(row["tool"]), failed=bool(row["failed"]))


def _image_from_json(row: Json) -> RecordedImage:
    name, frame = row["image"], row["frame"]
    image_path(Path(), name)  # refuses a name that leads elsewhere
    return RecordedImage(name=name, frame=None if frame is None else (int(frame[0]), int(frame[1])))


def answer_to_json(answer: RecordedAnswer) -> dict[str, Any]:
    """An answer as a JSON object."""
    score = answer.score
    return {
        "text": score.text,
        "reward": json_number(score.reward),
        "accuracy": json_number(score.accuracy),
        "parts": _parts_to_json(score.parts),
        "image_parts": list(map(_parts_to_json, score.image_parts)),
        "finish": score.finish,
        "turns": list(map(_turn_to_json, answer.turns)),
        "marks": list(map(mark_to_json, answer.marks)),
        "end": answer.end,
    }


def _answer_from_json(row: Json) -> RecordedAnswer:
    score = SampledAnswer(
        text=str(row["text"]),
        reward=from_json_number(row["reward"]),
        accuracy=from_json_number(row["accuracy"]),
        parts=_parts_from_json(row["parts"]),
        image_parts=tuple(map(_parts_from_json, row["image_parts"])),
        finish=_finish(row),
    )
    return RecordedAnswer(
        score=score,
        turns=tuple(map(_turn_from_json, row["turns"])),
        marks=tuple(map(_mark_from_json, row["marks"])),
        end=_END[row["end"]],
    )


def _turn_to_json(turn: RecordedTurn) -> dict[str, Any]:
    return {
        "messages": list(map(_message_to_json, turn.messages)),
        "text": turn.text,
        "finish": turn.finish,
        "tokens": None if turn.tokens is None else _tokens_to_json(turn.tokens),
        "version": turn.version,
        "reward": None if turn.reward is None else json_number(turn.reward),
        "seconds": json_number(turn.seconds),
    }


def _turn_from_json(row: Json) -> RecordedTurn:
    return RecordedTurn(
        messages=tuple(map(_message_from_json, row["messages"])),
        text=str(row["text"]),
        finish=_finish(row),
        tokens=None if row["tokens"] is None else _tokens_from_json(row["tokens"]),
        version=None if row["version"] is None else int(row["version"]),
        reward=None if row["reward"] is None else float(row["reward"]),
        seconds=from_json_number(row["seconds"]),
    )


def _tokens_to_json(tokens: TokenTrace) -> dict[str, Any]:
    return {
        "pieces": list(tokens.pieces),
        "engine": _numbers_to_json(tokens.engine_logprobs),
        "trainer": _numbers_to_json(tokens.trainer_logprobs),
        "advantages": _numbers_to_json(tokens.advantages),
    }


def _tokens_from_json(row: Json) -> TokenTrace:
    pieces = tuple(map(str, row["pieces"]))
    engine, trainer, advantages = (_numbers_from_json(row[name]) for name in ("engine", "trainer", "advantages"))
    if any(len(values) not in (0, len(pieces)) for values in (engine, trainer, advantages)):
        raise ValueError(f"values of {len(engine)}, {len(trainer)} and {len(advantages)} tokens for {len(pieces)}")
    return TokenTrace(pieces=pieces, engine_logprobs=engine, trainer_logprobs=trainer, advantages=advantages)


def _finish(row: Json) -> FinishReason:
    return "stop" if row["finish"] == "stop" else "length"


def _numbers_to_json(values: Sequence[float]) -> list[float | None]:
    return list(map(json_number, values))


def _numbers_from_json(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(map(from_json_number, values))


def _parts_to_json(parts: Mapping[str, float]) -> dict[str, float | None]:
    return {name: json_number(value) for name, value in parts.items()}


def _parts_from_json(parts: Mapping[str, float | None]) -> dict[str, float]:
    return {name: from_json_number(value) for name, value in parts.items()}
