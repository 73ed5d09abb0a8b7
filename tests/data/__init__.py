"""Rows that several tests read."""

from __future__ import annotations

NQSWAP = {
    "question": "who painted the ceiling",
    "org_context": "<P> Rosa painted it . </P>",
    "org_answer": ["Rosa", "Rosa Bell"],
    "sub_context": "<P> Hugo  painted it . </P>",
    "sub_answer": ["Hugo"],
}
