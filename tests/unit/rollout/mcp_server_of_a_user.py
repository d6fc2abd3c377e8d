"""An MCP server as a user writes it: over stdio, or with a port as argument over HTTP."""

import os
import sys
import time

from mcp.server import MCPServer

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
