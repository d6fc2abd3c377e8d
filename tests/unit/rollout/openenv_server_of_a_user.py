"""OpenEnv servers as a user writes them, by the kind of their actions: `act` (several fields) or `tools` (of an MCP
server)."""

import os
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Move(Action):
    a: int
    b: int


class Seen(Observation):
    text: str = ""


class Products(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, hint=""):
        return Seen(text=f"Make 12. {hint}")

    def step(self, action):
        if os.path.exists(os.environ.get("KILL", "")):
            os.unlink(os.environ["KILL"])
            os.kill(os.getpid(), 9)
        right = action.a * action.b == 12
        return Seen(text=str(action.a * action.b), done=right, reward=float(right))


class Calculator(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        server = FastMCP("calculator")

        @server.tool()
        def multiply(a: int, b: int) -> int:
            """Works out a product."""
            return a * b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Seen(text="3*4?")

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Seen(text="?")


if __name__ == "__main__":
    kind, port = sys.argv[1], int(sys.argv[2])
    if kind == "act":
        app = create_app(Products, Move, Seen, env_name="products")
    else:
        app = create_app(Calculator, CallToolAction, CallToolObservation, env_name="calculator")
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
