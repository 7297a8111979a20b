"""A small MCP server over stdin and stdout: two tools about reservoirs."""

import json
import sys
from typing import Any

RESERVOIR = {"type": "object", "properties": {"reservoir": {"type": "string"}}, "required": ["reservoir"]}
TOOLS = [
    {"name": "depth", "description": "How deep a reservoir is.", "inputSchema": RESERVOIR},
    {"name": "inflow", "description": "How much water flows into a reservoir.", "inputSchema": RESERVOIR},
]
ANSWERS = {"depth": "{} is 17 metres deep", "inflow": "4 cubic metres a second flow into {}"}


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        about = {"name": "water", "version": "1"}
        return {"protocolVersion": parameters["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        text = ANSWERS[parameters["name"]].format(parameters["arguments"]["reservoir"])
        return {"content": [{"type": "text", "text": text}]}
    return None


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        found = answer(asked["method"], asked.get("params", {}))
        result = {"error": {"code": -32601, "message": "no such method"}} if found is None else {"result": found}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **result}), flush=True)


main()
