"""Settings of MCP servers, whose tools the model may call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field
from pydantic.fields import FieldInfo

from fovea_gym.settings.base import HttpUrl, Seconds, Section


class McpServer(Section):
    """An MCP server, started by a command or reached at an address."""

    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Program and arguments of a server that communicates over stdin and stdout; it is ended with the run."""
    pass_env: tuple[str, ...] = ()
    """Names of environment variables to pass to the command, in addition to HOME, PATH, SHELL, TERM and USER."""
    url: HttpUrl | None = None
    """Address of a server that speaks streamable HTTP, such as http://127.0.0.1:8000/mcp."""
    api_key_env: str | None = None
    """Environment variable with the key for url, which is sent as a bearer token."""
    allow_private_addresses: bool = False
    """Allow an address in a private network; loopback addresses are always allowed."""
    tools: tuple[str, ...] | None = None
    """Names of the tools that the model may call; default: all."""
    timeout_seconds: Seconds = 60.0
    """Time limit of the start, and of each call."""

    def contradictions(self) -> Iterator[str]:
        if (self.command is None) == (self.url is None):
            yield "an MCP server has either a command or a url; set one of them"
        if self.url is None and self.api_key_env is not None:
            yield "api_key_env is sent only to a url; pass keys to a command with pass_env"


class McpServers(Section):
    """MCP servers by names of your choice, whose tools the model may call (docs/agents.md)."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, McpServer] = Field(init=False)
    entry: ClassVar[FieldInfo | None] = FieldInfo.from_annotation(McpServer)

    @property
    def by_name(self) -> Mapping[str, McpServer]:
        return self.__pydantic_extra__
