"""The command `fovea` in a folder of the README's reader, with small sizes for what trains."""

from __future__ import annotations

import os
import sys

from fovea.cli.main import main

SIZES = (
    *("max_steps=3", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=4", "parity.prompts=1"),
    *("evaluate.test_size=16", "evaluate.dev_size=8", "warmup.max_steps=3"),
)
SCENES = ("environment.train_size=80", "environment.dev_size=16", "environment.test_size=16")

if __name__ == "__main__":
    words = sys.argv[1:]
    if any(word.startswith("recipes/") for word in words) and words[0] != "config":
        words += [*SIZES, *(SCENES if any("shapes" in word for word in words) else ())]
    if words[:2] == ["data", "vqa"]:
        words += ["--rows", "80"]
    if words[:1] == ["view"]:
        words += ["--export", f"viewed-{os.getpid()}.html"]  # the server of the page ends by Ctrl-C
    sys.argv = [".venv/bin/fovea", *words]
    main()
