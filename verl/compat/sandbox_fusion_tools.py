"""`SandboxFusionTool` of the public system: the model runs Python programs in a sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

from verl.reward.sandbox import local, service
from verl.rollout.tools.tool import BaseTool, ToolResponse

_CODE = {"type": "string", "description": "The program; what it prints is the answer."}
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Run a Python program.",
        "parameters": {"type": "object", "properties": {"code": _CODE}, "required": ["code"]},
    },
}


class SandboxFusionTool(BaseTool):
    """Run the argument `code`. config: `sandbox_fusion_url` (a service of that interface; without it, programs run in
    this machine's sandbox), `default_timeout` (seconds of a program, 30), `memory_limit_mb` (1024), `rate_limit` (most
    programs at a time in a process, 10). Languages other than Python are refused to the model."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None):
        super().__init__(config, tool_schema or _SCHEMA)
        self.sandbox_fusion_url: str = config.get("sandbox_fusion_url") or ""
        self.default_timeout = float(config.get("default_timeout", 30))
        self.default_language: str = config.get("default_language", "python")
        self.memory_limit_mb = int(config.get("memory_limit_mb", 1024))
        self.rate_limit = int(config.get("rate_limit", 10))
        self._room = asyncio.Semaphore(self.rate_limit)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """What the program printed, and how it ended unless it ended well."""
        language = parameters.get("language", self.default_language)
        if language != "python":
            return ToolResponse(text=f"Error: {language} programs cannot be run, python ones can"), 0.0, {}
        seconds = float(parameters.get("timeout", self.default_timeout))
        async with self._room:
            text = await asyncio.to_thread(self.execute_code, instance_id, str(parameters.get("code", "")), seconds)
        return ToolResponse(text=text), 0.0, {}

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> str:
        """The same at once. ServiceFailed or SandboxFailed where no program can be run."""
        limits: dict[str, Any] = {"seconds": timeout, "memory_mb": self.memory_limit_mb}
        url = self.sandbox_fusion_url
        ran = service.run(url, code, **limits) if url else local.run(code, **limits)
        return ran.output if ran.finished else f"{ran.output}\n{ran.note}".strip()
