"""An MCP server as a user writes it, with the package's own server class: `mcp_server.py [http PORT]`."""

from __future__ import annotations

import io
import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from PIL import Image as Pictures

server = MCPServer("squares")


@server.tool()
def square(colour: str, side: int = 32) -> Image:
    """Draw a square of a colour."""
    content = io.BytesIO()
    Pictures.new("RGB", (side, side), colour).save(content, "PNG")
    return Image(data=content.getvalue(), format="png")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def long() -> str:
    """Return a long text."""
    return "x" * 30_000


@server.tool()
def broken() -> str:
    """Raise."""
    raise RuntimeError("the pen is empty")


@server.tool()
def slow() -> str:
    """Take ten seconds."""
    time.sleep(10)
    return "late"


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def pid() -> str:
    """Return the server's process id."""
    return str(os.getpid())


@server.tool()
def variable(name: str) -> str:
    """Return an environment variable."""
    return os.environ.get(name, "none")


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
