"""The notebooks of notebooks/ with the outputs of a run, which `python -m tests.stored_notebooks` writes anew."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 300


def executed(file: Path, folder: Path, cell_seconds: int = CELL_SECONDS) -> nbformat.NotebookNode:
    """The notebook with the outputs of its cells, run from top to bottom in a folder."""
    os.environ["PYTHONPATH"], os.environ["OMP_NUM_THREADS"] = str(ROOT), "1"
    notebook = nbformat.read(file, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=cell_seconds, record_timing=False, resources=place).execute()


def store(file: Path, done: nbformat.NotebookNode) -> None:
    """Write the outputs into the file, but for warnings, which are of this machine."""
    notebook = nbformat.read(file, as_version=4)
    for cell, ran in zip(notebook.cells, done.cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs = [output for output in ran.outputs if output.get("name") != "stderr"]
            cell.execution_count = ran.execution_count
    nbformat.write(notebook, file)


if __name__ == "__main__":
    for each in FILES:
        with TemporaryDirectory() as empty:
            store(each, executed(each, Path(empty), cell_seconds=1800))
