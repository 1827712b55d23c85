"""Pages for users of other systems, generated from importer/elsewhere.yaml.

`python -m fovea_tools.importer.docs verl` prints the page for verl.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from fovea_gym.settings.type_text import show
from fovea_tools.importer.elsewhere import Counterpart, Pair, System, systems
from fovea_tools.importer.reading import IMPORTED

HEAD = """\
# From {title}

{about}

This page describes {seen}.
Error messages about unknown keys in a recipe or on the command line use the same table. This page is generated from
`tools/fovea_tools/importer/elsewhere.yaml`; `python -m fovea_tools.importer.docs {name}` prints it.
"""
IMPORT = {
    "verl": """\
## A command line becomes a recipe

```bash
# needs your own script
fovea import-config run_qwen2_5_vl-7b.sh --environment geo3k --out mine.yaml
fovea import-config run.sh actor_rollout_ref.rollout.n=8 --environment vqa   # settings after the file win
```

It reads scripts, YAML files (of several, the later ones win) and bare `key=value` words. A script is read, not run:
quotes, arrays, `$NAME`, `${1:-vllm}` and `$((2 * 1024))` are expanded, and the command asks for any value that needs
more than that. Settings that affect learning are written with verl's defaults if you leave them out. A comment after
each line of the recipe gives its source. The head of the recipe lists settings without a counterpart, each with the
reason, and unknown ones. Nothing is guessed, and settings that contradict each other are an error.
`--environment` names the environment of the rows; with geo3k the reward is the same as from verl's grader.
""",
    "rlinf": """\
## A YAML becomes a recipe

```bash
# needs your own file
fovea import-config qwen3-vl-2b-grpo-fsdp-geo3k.yaml runner.max_steps=750 --out mine.yaml
```

References such as `${subtract:${runner.seq_length}, ${data.max_prompt_length}}` are resolved. A share of all steps, as
in `lr_warmup_fraction`, needs the number of steps, which RLinf counts from the rows: set it, as above. A comment after
each line of the recipe gives its source. The head of the recipe lists settings without a counterpart, each with the
reason, and unknown ones. Nothing is guessed, and settings that contradict each other are an error.
""",
}
NEEDLESS = "## Settings that are not needed here\n"


def page(system: System) -> str:
    """The page of a system, as Markdown."""
    name, title = system.name, system.title
    about = textwrap.fill(system.about, 118, break_long_words=False, break_on_hyphens=False)
    parts = [HEAD.format(name=name, title=title, about=about, seen=system.seen)]
    parts += [IMPORT[name]] if name in IMPORTED else []
    parts += ["## Commands\n", *_table((title, "Fovea", "remarks"), map(_command, system.commands)), ""]
    for chapter, settings in system.chapters.items():
        restricted = [setting for setting in settings if setting.harmless != "any"]
        if restricted:
            parts += [f"## {chapter}\n", *_table((title, "Fovea", "differences"), map(_setting, restricted)), ""]
    parts += ["## Metrics\n", *_table((title, "Fovea", "differences"), map(_metric, system.metrics))]
    needless = list(_needless(system.settings))
    return "\n".join([*parts, *(["", NEEDLESS, *needless] if needless else []), ""])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (head, *rows)]
    return [lines[0], f"|{'---|' * len(head)}", *lines[1:]]


def _command(pair: Pair) -> tuple[str, str, str]:
    return f"`{pair.theirs}`", f"`{pair.ours}`", pair.note


def _metric(pair: Pair) -> tuple[str, str, str]:
    return f"`{pair.theirs}`", ", ".join(f"`{each}`" for each in pair.ours.split(", ")), pair.note


def _setting(setting: Counterpart) -> tuple[str, str, str]:
    ours = " and ".join(f"`{key}`" for key in setting.ours) or "none"
    values = setting.values or {}
    said = [f"{show(theirs)} is {show(own)}" for theirs, own in values.items() if theirs != own]
    default = [f"default {setting.default if isinstance(setting.default, str) else show(setting.default)}"]
    default = default if setting.has_default else []
    return f"`{setting.theirs}`", ours, "; ".join(filter(None, [setting.none, setting.note, *said, *default]))


def _needless(settings: Iterable[Counterpart]) -> Iterator[str]:
    """A line for each reason, with the settings that can be dropped without effect."""
    keys: dict[str, list[str]] = {}
    for setting in settings:
        if setting.harmless == "any":
            keys.setdefault(setting.none, []).append(f"`{setting.theirs}`")
    return (f"* {', '.join(keys[reason])}: {reason}" for reason in keys)


if __name__ == "__main__":
    sys.stdout.write(page(systems()[sys.argv[1]]))
