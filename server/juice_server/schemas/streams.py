"""What the document says of answers that may be streams."""

from __future__ import annotations

from typing import Any

STEERING_HEADER = "x-juice-steering"
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "text/event-stream": {
                "schema": {
                    "type": "object",
                    "description": "One event of the stream.",
                    "required": ["data"],
                    "properties": {
                        "event": {
                            "type": "string",
                            "description": "Its type, in protocols whose events have one.",
                        },
                        "data": {
                            "type": "string",
                            "description": "A JSON object, or `[DONE]` where a stream ends so.",
                        },
                    },
                }
            }
        },
        "headers": {
            STEERING_HEADER: {
                "description": (
                    "What was applied: a JSON object with some of the fields of `steering`. A "
                    "stream's is written before a gate has decided."
                ),
                "schema": {"type": "string"},
            }
        },
    }
}
