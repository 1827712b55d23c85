"""Builder of a run's tools, and of the environment in which the model calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fovea.config.run import Config
from fovea.errors import ModelError
from fovea.models.processor import Processor
from fovea.models.render import Renderer
from fovea.models.tool_calls import format_of
from fovea.wiring.images import result_limits
from fovea_gym.environments.access import Part
from fovea_gym.environments.base import Environment
from fovea_gym.environments.mixture import Mixture
from fovea_gym.environments.sessions import LimitedSessions
from fovea_gym.errors import ConfigError
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.environments import MixtureEnvironment
from fovea_gym.settings.mcp import McpServers
from fovea_gym.settings.splits import SessionLimits
from fovea_gym.tools.base import THOUSANDTHS, Frame, Tool
from fovea_gym.tools.calls.json_calls import JsonCalls
from fovea_gym.tools.loading import load_tools
from fovea_gym.tools.picture_tools import MEASURE, PictureTool
from fovea_gym.tools.session import ToolUse, WithTools
from fovea_gym.types import Message

SESSION = "environment.session."
"""Prefix of the limits of sessions in a recipe."""
RESUME = ", then set resume=auto"
"""End of the advice in errors about user code that blocked a run."""


def make_tools(config: Config, given: Sequence[object] = ()) -> tuple[Tool, ...]:
    """Load the tools that the settings name; `given` are the objects that Python code gave for these names."""
    settings = config.environment
    loaded = load_tools(
        settings.tools,
        allow_python=settings.allow_python,
        allow_unconfined=settings.allow_unconfined_python,
        given=given,
        section="environment.",
    )
    return loaded if not settings.mcp.by_name else _with_servers(loaded, settings.mcp)


def _with_servers(loaded: Sequence[Tool], servers: McpServers) -> tuple[Tool, ...]:
    from fovea_gym.adapters.mcp import McpConnection  # an optional extra; the module reports its absence

    named = {tool.spec.name: tool for tool in loaded}
    for name, server in servers.by_name.items():
        for tool in McpConnection(name, server).tools():
            if tool.spec.name in named:
                raise ConfigError(
                    f"environment.mcp.{name} has a tool {tool.spec.name}, but the run already has one of this name; "
                    f"list the tools to take from this server in environment.mcp.{name}.tools"
                )
            named[tool.spec.name] = tool
    return tuple(named.values())


def uses_tools(environment: Environment, tools: Sequence[Tool]) -> bool:
    """True if the model may call tools, from the settings or from its environment."""
    return bool(tools) or environment.uses_tools


def with_tools(
    config: Config,
    environment: Environment,
    tools: Sequence[Tool],
    make_use: Callable[[], ToolUse],
) -> Environment:
    """Wrap the environment so that the model may call tools, within the limits of sessions; unchanged without tools."""
    if not uses_tools(environment, tools):
        return environment
    if not tools and isinstance(environment, Mixture) and isinstance(config.environment, MixtureEnvironment):
        parts = config.environment.parts.by_name

        def of_part(name: str, part: Part) -> Environment:
            own = config.model_copy(update={"environment": parts[name].environment})
            return with_tools(own, part.environment, part.tools, make_use)

        return environment.changed(of_part)
    settings = config.environment
    inside = environment.inside if isinstance(environment, LimitedSessions) else environment
    # an environment with its own tools includes the turns with calls in its max_turns
    further = settings.max_tool_turns if tools else 0
    use = make_use()
    if (
        named := []
        if use.shows_pictures
        else [tool.spec.name for tool in tools if isinstance(tool, PictureTool) and tool.name != MEASURE.name]
    ):
        raise ModelError(
            f"environment.tools: {', '.join(named)} return pictures, which the chat template of "
            f"model.path={config.model.name} leaves out; put the chat_template.jinja of a newer revision of the model "
            "into its folder, or leave out these tools"
        )
    calling = WithTools(inside, use, tools, max_turns=inside.max_turns + further)
    asks_score = not isinstance(environment, LimitedSessions) or environment.asks_score
    return limited(calling, settings.session, type(inside).__name__, asks_score=asks_score)


def limited(environment: Environment, limits: SessionLimits, name: str, *, asks_score: bool = True) -> LimitedSessions:
    """Wrap an environment in the limits of sessions; errors name the limits as in a recipe."""
    return LimitedSessions(environment, limits, name, settings=SESSION, way_out=RESUME, asks_score=asks_score)


def use_of_model(
    config: Config, processor: Processor, renderer: Renderer, opener: ImageOpener, warn: Callable[[str], None]
) -> ToolUse:
    """Tool calls of a model that is loaded here; ModelError if the format of its calls is not known."""
    return ToolUse(
        format=format_of(processor.chat_template, processor.name),
        frame=frame_of(renderer),
        limits=result_limits(config.data, opener),
        check_picture=lambda ref: renderer.fewest_tokens([Message(role="tool", parts=(ref,))]),
        shows_pictures=renderer.shows_tool_pictures,
        warn=warn,
    )


def use_of_server(config: Config, opener: ImageOpener, warn: Callable[[str], None]) -> ToolUse:
    """Tool calls of a served model of unknown template and family: JSON in tags, coordinates in thousandths."""
    return ToolUse(
        format=JsonCalls(),
        frame=THOUSANDTHS,
        limits=result_limits(config.data, opener),
        check_picture=opener,
        warn=warn,
    )


def frame_of(renderer: Renderer) -> Frame:
    """The coordinate frame of the renderer's model."""
    if not renderer.gives_pixels:
        return THOUSANDTHS
    return Frame(description="in pixels of the picture in the size in which you see it", size=renderer.box_frame)
