"""An MCP server over stdio with one tool, `measure`, which answers with a text and an image. After its first call there is a second tool,
`drain`, and the client is told."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
        "1f15c4890000000d49444154789c63f8cfc0f01f00050001ff3bdc9e2d0000000049454e44ae426082"
    )
).decode()


def tool(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "description": description, "inputSchema": {"type": "object", "properties": {"at": {"type": "string"}}}}


def write(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def main() -> None:
    tools = [tool("measure", "Measures the water.")]
    for line in sys.stdin:
        message = json.loads(line)
        result: dict[str, Any] = {}
        match message["method"]:
            case "initialize":
                server = {"capabilities": {"tools": {"listChanged": True}}, "serverInfo": {"name": "dam", "version": "1"}}
                result = {"protocolVersion": message["params"]["protocolVersion"], **server}
            case "tools/list":
                result = {"tools": tools}
            case "tools/call":
                if len(tools) == 1:
                    tools.append(tool("drain", "Drains the reservoir."))
                    write(method="notifications/tools/list_changed")
                image = {"type": "image", "data": PIXEL, "mimeType": "image/png"}
                result = {"content": [{"type": "text", "text": f"{message['params']['name']}: 312 m"}, image]}
        if "id" in message:
            write(id=message["id"], result=result)


main()
