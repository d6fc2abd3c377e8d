"""An MCP server as a user writes it: over stdio, or with a port as argument over HTTP."""

import os
import sys
import time
from io import BytesIO

from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("calculator")


@server.tool()
def calculate(expression: str) -> str:
    """Works out a product; who finds the file KILL takes it away and kills the server."""
    try:
        os.unlink(os.environ.get("KILL", ""))
        os.kill(os.getpid(), 9)
    except FileNotFoundError:
        pass
    a, b = expression.split("*")
    return str(int(a) * int(b))


@server.tool()
def photo() -> list:
    """A text and a red picture."""
    from PIL import Image as Picture

    data = BytesIO()
    Picture.new("RGB", (8, 8), "red").save(data, "png")
    return ["here it is", Image(data=data.getvalue(), format="png")]


@server.tool()
def pid() -> str:
    """Who answers."""
    return str(os.getpid())


@server.tool()
def die() -> str:
    """Ends the server."""
    os.write(2, b"no licence\n")
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Answers nobody any more."""
    time.sleep(60)
    return ""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
