"""Tools of MCP servers, called with the client of the package `mcp` over stdin and stdout or streamable HTTP.

A run connects to each server once, on an event loop separate from the run's. If a server has ended, the calls that
notice it fail, and the next call reconnects. Tools are listed once, at the start. Output is bounded: characters and
pictures of a result here, bytes and pixels of a picture where it is opened.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from fovea_gym.errors import ConfigError, MissingExtraError, first_line
from fovea_gym.processes import tied
from fovea_gym.rows.fetch import is_public
from fovea_gym.settings.mcp import McpServer
from fovea_gym.tools.base import Picture, ToolError
from fovea_gym.types import ImageRef, ToolSpec
from fovea_gym.utils.addresses import is_loopback
from fovea_gym.utils.event_loop import BackgroundLoop, warning_if_slow
from fovea_gym.utils.http_json import bearer
from fovea_gym.utils.installing import pip_install

try:
    from mcp import Client, MCPError
    from mcp.client.stdio import StdioServerParameters
    from mcp.client.streamable_http import streamable_http_client
    from mcp_types import (
        CONNECTION_CLOSED,
        CallToolResult,
        EmbeddedResource,
        ImageContent,
        TextContent,
        TextResourceContents,
    )
except ImportError as error:
    raise MissingExtraError(f"tools of MCP servers need the package mcp; {pip_install('mcp')}") from error

LOG = logging.getLogger(__name__)
MAX_TOOLS = 128
MAX_RESULT_CHARACTERS = 20_000
"""Most characters of each text in a result; the rest is cut off."""
MAX_RESULT_BLOCKS = 64
MAX_RESULT_PICTURES = 8
# the client logs a traceback for each line that is not part of the protocol; `_noted` reports it in one line
logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool:
    """A tool of an MCP server."""

    spec: ToolSpec
    server: McpConnection

    async def call(self, arguments: Mapping[str, object], pictures: Sequence[Picture]) -> Sequence[str | ImageRef]:
        """Call the tool and return its texts and pictures; ToolError if the tool or the server reports a failure."""
        return parts_of(await self.server.call(self.spec.name, arguments), f"{self.server.name}.{self.spec.name}")


class McpConnection:
    """The connection to one MCP server that the settings name."""

    def __init__(self, name: str, settings: McpServer) -> None:
        self.name = name
        self._settings = settings
        self._loop = BackgroundLoop(f"MCP server {name}")
        self._serving: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] | None = None
        self._has_printed = False

    def tools(self) -> tuple[McpTool, ...]:
        """Connect and list the tools; ConfigError if the server cannot be reached or lacks a requested tool."""
        try:
            listed = self._loop.wait(self._listed())
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"MCP server {self.name} ({self._place}) did not list its tools ({first_line(_innermost(error))}); "
                "start it, or correct its command or url"
            ) from error
        specs = {spec.name: spec for spec in listed}
        names = self._settings.tools or tuple(specs)
        for name in names:
            if name not in specs:
                raise ConfigError(
                    f"MCP server {self.name} has no tool {name}, only {', '.join(specs)}; correct its setting `tools`"
                )
        if len(names) > MAX_TOOLS:
            raise ConfigError(
                f"MCP server {self.name} has {len(names)} tools, more than {MAX_TOOLS}; choose some with tools=(...)"
            )
        return tuple(McpTool(spec=specs[name], server=self) for name in names)

    async def call(self, tool: str, arguments: Mapping[str, object]) -> CallToolResult:
        """Call a tool; ToolError if the server has ended, exceeds its time limit or refuses the call."""
        try:
            return await self._loop.run(self._called(tool, arguments))
        except Exception as error:
            cause = _innermost(error)
            text = "is late" if isinstance(cause, TimeoutError) else f"failed: {first_line(cause)}"
            raise ToolError(f"MCP server {self.name} {text}") from error

    def close(self) -> None:
        """Disconnect, and end the server if this connection started it with a command."""
        self._loop.close(self._end)

    @property
    def _place(self) -> str:
        settings = self._settings
        return f"at {settings.url}" if settings.command is None else f"`{' '.join(settings.command)[:80]}`"

    async def _listed(self) -> list[ToolSpec]:
        limit = self._settings.timeout_seconds
        with warning_if_slow(f"MCP server {self.name} ({self._place}) has not listed its tools", limit):
            async with asyncio.timeout(limit):
                client = await self._connected()
                listed = (await client.list_tools()).tools
        return [
            ToolSpec(name=tool.name, description=tool.description or "", parameters=tool.input_schema)
            for tool in listed
        ]

    async def _called(self, tool: str, arguments: Mapping[str, object]) -> CallToolResult:
        async with asyncio.timeout(self._settings.timeout_seconds):
            client = await self._connected()
            try:
                return await client.call_tool(tool, dict(arguments))
            except MCPError as error:
                if error.error.code == CONNECTION_CLOSED:
                    await self._end()  # the next call connects again
                raise

    async def _connected(self) -> Client:
        if self._client is None or self._serving is None or self._serving.done():
            self._client = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._client))
        return await asyncio.shield(self._client)

    async def _serve(self, ready: asyncio.Future[Client]) -> None:
        """Keep the connection open; the package requires it to be opened and closed in the same task."""
        try:
            async with AsyncExitStack() as stack:
                server = await self._server(stack)
                client = Client(server, message_handler=self._noted, cache=None)
                ready.set_result(await stack.enter_async_context(client))
                await asyncio.get_running_loop().create_future()  # waits until `_end` cancels it
        except Exception as error:
            if not ready.done():
                ready.set_exception(_innermost(error))

    async def _server(self, stack: AsyncExitStack) -> Any:
        settings = self._settings
        if settings.command is not None:
            program = shutil.which(settings.command[0])
            if program is None:
                raise ConfigError(
                    f"MCP server {self.name}: there is no program {settings.command[0]}; install it, or give its path"
                )
            tied_to = ["-I", "-S", tied.__file__, str(os.getpid()), program, *settings.command[1:]]
            passed = {name: os.environ[name] for name in settings.pass_env if name in os.environ}
            return StdioServerParameters(command=sys.executable, args=tied_to, env=passed)
        assert settings.url is not None
        host = urlsplit(settings.url).hostname or ""
        await asyncio.to_thread(_check_address, self.name, host, settings.allow_private_addresses)
        client = httpx2.AsyncClient(
            headers=bearer(settings.api_key_env, f"MCP server {self.name}: api_key_env"),
            timeout=settings.timeout_seconds,
            # ignore HTTP_PROXY for localhost: the proxy would connect to its own localhost
            trust_env=not is_loopback(host),
        )
        return streamable_http_client(settings.url, http_client=await stack.enter_async_context(client))

    async def _noted(self, message: object) -> None:
        """Warn once if the server prints to stdout, which carries the protocol's messages."""
        if isinstance(message, ValueError) and not self._has_printed:
            self._has_printed = True
            LOG.warning(
                "MCP server %s prints to stdout, which carries the protocol; those lines are "
                "skipped; make it print to stderr",
                self.name,
            )

    async def _end(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])


def parts_of(result: CallToolResult, tool: str) -> tuple[str | ImageRef, ...]:
    """Texts and pictures of a result, in order; ToolError for a failed call, or a picture that is not base64."""
    if len(result.content) > MAX_RESULT_BLOCKS:
        raise ToolError(f"{tool} returned {len(result.content)} texts and pictures; the limit is {MAX_RESULT_BLOCKS}")
    parts: list[str | ImageRef] = []
    for block in result.content:
        match block:
            case TextContent():
                parts.append(_bounded(block.text))
            case ImageContent():
                parts.append(_picture(block, tool))
            case EmbeddedResource(resource=TextResourceContents() as resource):
                parts.append(_bounded(resource.text))
            case _:
                parts.append(f"[{block.type}: not shown]")
    if result.is_error:
        raise ToolError(" ".join(part for part in parts if isinstance(part, str)) or f"{tool} failed")
    num_pictures = sum(isinstance(part, ImageRef) for part in parts)
    if num_pictures > MAX_RESULT_PICTURES:
        raise ToolError(f"{tool} returned {num_pictures} pictures; at most {MAX_RESULT_PICTURES} are shown")
    return tuple(parts)


def _bounded(text: str) -> str:
    left_out = len(text) - MAX_RESULT_CHARACTERS
    return text if left_out <= 0 else f"{text[:MAX_RESULT_CHARACTERS]} [{left_out} more characters]"


def _picture(block: ImageContent, tool: str) -> ImageRef:
    try:
        return ImageRef(source=base64.b64decode(block.data, validate=True), where=f"the result of {tool}")
    except ValueError as error:
        raise ToolError(f"{tool} returned a picture that is not base64") from error


def _check_address(name: str, host: str, allow_private: bool) -> None:
    """Raise ConfigError for a host in a private network, unless that is allowed or the host is this machine."""
    addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    private = sorted(each for each in addresses if not is_loopback(each) and not is_public(each))
    if private and not allow_private:
        raise ConfigError(
            f"MCP server {name}: {host} is at {private[0]}, in a private network; set allow_private_addresses=True if "
            "you trust it"
        )


def _innermost(error: BaseException) -> BaseException:
    """The first exception inside nested exception groups, which the package's task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
