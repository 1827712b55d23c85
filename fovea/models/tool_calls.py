"""The format in which a chat template writes tool calls."""

from __future__ import annotations

import re

from fovea.errors import ModelError
from fovea_gym.tools.calls.base import CallFormat
from fovea_gym.tools.calls.gemma_calls import GemmaCalls, is_written_by
from fovea_gym.tools.calls.json_calls import OPENING, JsonCalls
from fovea_gym.tools.calls.xml_calls import XmlCalls


def reads_tools(template: str) -> bool:
    """True if the chat template itself writes the list of tools."""
    return re.search(r"\btools\b", template) is not None


def format_of(template: str, name: str) -> CallFormat:
    """The format in which a chat template writes calls; JSON in tags for a template without tools.

    ModelError if the template writes tool calls in an unknown format; `name` is the name of the model.
    """
    if is_written_by(template):
        return GemmaCalls()
    if "<function=" in template and "<parameter=" in template:
        return XmlCalls()
    if not reads_tools(template) or (OPENING in template and "arguments" in template):
        return JsonCalls()
    raise ModelError(
        f"model.path={name}: its chat template writes tool calls in a format that Fovea does not read; it reads the "
        "formats of Qwen3-VL, Qwen3.5 and Gemma 4: choose another model, or unset environment.tools"
    )
