"""The package verifiers plays an environment with pictures against the endpoint for agents, by the docs' command.

Only where FOVEA_VERIFIERS_PYTHON names an interpreter with the package: it needs other versions than Fovea's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.commands.agent_serving import KEY, Served

INTERPRETER = os.environ.get("FOVEA_VERIFIERS_PYTHON", "")
PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")


@pytest.mark.skipif(not INTERPRETER, reason="FOVEA_VERIFIERS_PYTHON names no interpreter with the package verifiers")
def test_verifiers_plays_turns_with_pictures_that_are_recorded(tmp_path: Path) -> None:
    served = Served(tmp_path / "episodes")
    (command,) = re.findall(r"^vf-eval (?:.*\\\n)*.*$", PAGE, re.MULTILINE)
    for example, here in (("my_taskset", "verifiers_gallery"), ("http://127.0.0.1:8000/v1", served.url)):
        assert example in command
        command = command.replace(example, here)
    words = shlex.split(command.replace("\\\n", " "))
    tools = Path(INTERPRETER).parent
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parent),
        "FOVEA_KEY": KEY,
    }
    subprocess.run(
        [str(tools / words[0]), *words[1:], "--no-rich", "-r", "2", "-o", str(tmp_path / "out")],
        env=environment,
        check=True,
        capture_output=True,
    )
    served.server.should_exit = True
    (file,) = (tmp_path / "out").rglob("traces.jsonl")
    traces = [trace for line in file.read_text().splitlines() for trace in json.loads(line)["traces"]]
    said = [[node["message"]["content"] for node in trace["nodes"] if node["sampled"]] for trace in traces]
    episodes: dict[str, list[str]] = {}
    for turn in served.turns():
        assert len(turn["image_keys"]) == 1
        texts = episodes.setdefault(turn["episode"], [])
        texts.append(turn["text"])
        assert turn["turn"] == len(texts)
    assert sorted(said) == sorted(episodes.values())
    assert [len(texts) for texts in said] == [3, 3]
