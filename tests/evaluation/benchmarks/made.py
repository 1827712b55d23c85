"""Small benchmarks, made here, in the files and columns of the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fovea.report.images import png_bytes

Row = dict[str, Any]


def png(number: int) -> bytes:
    return png_bytes(Image.new("RGB", (48, 48), (40 * number % 256, 90, 200 - 30 * number % 200)))


def cell(number: int) -> Row:
    """A picture as a cell of the hub's Parquet files."""
    return {"bytes": png(number), "path": None}


def _mathvista() -> list[Row]:
    kinds: list[tuple[str, str, list[str] | None, float | None, str | None, str]] = [
        ("multi_choice", "text", ["red", "green", "blue"], None, None, "green"),
        ("free_form", "integer", None, None, "$", "14"),
        ("free_form", "float", None, 1.0, None, "1.2"),
        ("free_form", "float", None, 2.0, "cm", "0.35"),
        ("free_form", "list", None, None, None, "[2007, 2008]"),
    ]
    metadata = {"split": "testmini", "task": "figure question answering", "skills": ["arithmetic reasoning"]}
    return [
        {
            **{"pid": str(place), "question": f"What is in drawing {place}?", "image": f"images/{place}.jpg"},
            **{"decoded_image": cell(place), "choices": choices, "unit": unit, "precision": precision},
            **{"answer": answer, "question_type": question_type, "answer_type": answer_type},
            **{"metadata": metadata, "query": "not read"},
        }
        for place, (question_type, answer_type, choices, precision, unit, answer) in enumerate(kinds)
    ]


def _mathverse() -> list[Row]:
    kinds = [("multi-choice", "Text Dominant", "C"), ("free-form", "Vision Only", "55")]
    metadata = {"split": "testmini", "source": "made", "subject": "Plane Geometry", "subfield": "Angle"}
    return [
        {
            **{"sample_index": str(place), "problem_index": "1", "problem_version": version},
            **{"question": "As shown, find x.", "image": cell(place), "answer": answer},
            **{"question_type": question_type, "metadata": metadata, "query_cot": "not read"},
            "query_wo": f"Please directly answer the question.\nQuestion: As shown, find x in version {place}.\n",
            "question_for_eval": "As shown, find x.",
        }
        for place, (question_type, version, answer) in enumerate(kinds)
    ]


def _mathvision() -> list[Row]:
    kinds: list[tuple[list[str], str]] = [([], "61"), (["A", "B", "C"], "B"), (["1", r"\frac{1}{2}", "2"], "B")]
    return [
        {
            **{"id": str(place + 4), "question": f"How many daisies are on card {place}?\n<image1>"},
            **{"options": options, "answer": answer, "solution": None, "level": 2, "subject": "counting"},
            "image": f"images/{place + 4}.jpg",
        }
        for place, (options, answer) in enumerate(kinds)
    ]


def _mmmu() -> list[Row]:
    kinds = [
        ("Look at <image 1>: what is it?", "['a cube', 'a cone', 'a ball']", "C", "multiple-choice", 1),
        ("Which of the options follows <image 1> ?", "['<image 2>', '<image 3>']", "A", "multiple-choice", 3),
        ("<image 2> comes after <image 1>. How much more? See <image 1> again.", "[]", "['8', 'eight']", "open", 2),
        ("No picture is named here.", "['yes', 'no']", "B", "multiple-choice", 1),
    ]
    return [
        {
            "id": f"validation_{('Art', 'Basic_Medical_Science')[place // 2]}_{place}",
            **{"question": question, "options": options, "explanation": ""},
            **{f"image_{n}": cell(n) if n <= images else None for n in range(1, 8)},
            **{"answer": answer, "question_type": question_type},
        }
        for place, (question, options, answer, question_type, images) in enumerate(kinds)
    ]


def _hallusionbench() -> list[Row]:
    kinds = [("VS", "0", "0", None), ("VS", "1", "1", "./VS/chart/0_1.png"), ("VD", "0", "1", "./VD/chart/0_0.png")]
    return [
        {
            **{"category": category, "subcategory": "chart", "visual_input": "0" if filename is None else "1"},
            **{"set_id": "0", "figure_id": figure, "sample_note": "made", "question_id": "0"},
            **{"question": "Is the left line the longer one?", "gt_answer_details": "made", "gt_answer": truth},
            "filename": filename,
        }
        for category, figure, truth, filename in kinds
    ]


def _vstar() -> list[Row]:
    kinds = [
        ("direct_attributes", "What is the glove made of?", ("rubber", "cotton", "kevlar", "leather"), "A"),
        ("relative_position", "Is the dog left of the (red) car?", ("right", "left"), "B"),
        ("direct_attributes", "Which colour?", ("red (dark)", "green", "blue", "white"), "D"),
    ]
    asks = "\nAnswer with the option's letter from the given choices directly."
    return [
        {
            "image": f"{category}/sa_{place}.jpg",
            "text": f"{question}\n{listed}{asks if place == 0 else ''}",
            "category": category,
            "label": truth,
            "question_id": str(place),
        }
        for place, (category, question, options, truth) in enumerate(kinds)
        for listed in ["\n".join(f"({letter}) {option}" for letter, option in zip("ABCD", options, strict=False))]
    ]


def _refcoco() -> list[Row]:
    kinds = [(["the red one", "largest"], [4.0, 6.5, 20.0, 30.0]), (["man on the left"], [0.0, 0.0, 48.0, 24.0])]
    return [
        {
            **{"question_id": str(place), "image": cell(place), "question": "not read", "answer": expressions},
            **{"bbox": box, "file_name": f"COCO_train2014_{place}.jpg"},
        }
        for place, (expressions, box) in enumerate(kinds)
    ]


def _screenspot() -> list[Row]:
    kinds = [
        ("open the settings", [0.1, 0.2, 0.3, 0.25], "icon", "windows"),
        ("search", [0.5, 0.5, 0.75, 0.625], "text", "ios"),
        ("log in", [0.0, 0.9, 0.25, 1.0], "text", "shop"),
    ]
    return [
        {
            **{"file_name": f"{place}.png", "image": cell(place), "bbox": box, "instruction": instruction},
            **{"data_type": kind, "data_source": source},
        }
        for place, (instruction, box, kind, source) in enumerate(kinds)
    ]


ROWS = {
    "mathvista": _mathvista,
    "mathverse": _mathverse,
    "mathvision": _mathvision,
    "mmmu": _mmmu,
    "hallusionbench": _hallusionbench,
    "vstar": _vstar,
    "refcoco": _refcoco,
    "screenspot": _screenspot,
}


def write(folder: Path, name: str, rows: list[Row] | None = None) -> Path:
    """Write a benchmark to a new folder as its authors publish it; returns the folder."""
    rows = ROWS[name]() if rows is None else rows
    folder.mkdir(parents=True, exist_ok=True)
    if name in {"mathvision", "vstar"}:
        file = {"mathvision": "test.jsonl", "vstar": "test_questions.jsonl"}[name]
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        _pictures(folder, [row["image"] for row in rows])
    elif name == "hallusionbench":
        (folder / "HallusionBench.json").write_text(json.dumps(rows), encoding="utf-8")
        _pictures(folder, [row["filename"] for row in rows if row["filename"]])
    elif name == "mmmu":
        for subject in ("Art", "Basic_Medical_Science"):
            of_subject = [row for row in rows if f"_{subject}_" in row["id"]]
            parquet(folder / subject / "validation-00000-of-00001.parquet", of_subject)
    else:
        files = {"mathvista": "data/testmini-{}", "refcoco": "data/val-{}", "screenspot": "data/test-{}"}
        parquet(folder / files.get(name, "testmini.parquet").format("00000-of-00001.parquet"), rows)
    return folder


def _pictures(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(number))


def parquet(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
