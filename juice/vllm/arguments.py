"""What travels with a request through vLLM: its coefficients, as JSON text in `extra_args`.

vLLM passes on whatever `extra_args` its clients send, and its workers trust them. So a process that
takes requests accepts coefficients only once JuICE itself writes them there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from juice.engine import Steering

KEY = "juice"
FIRST = "juice_first"  # of an unsteered request that goes before all that wait
STRUCTURE = "juice_structure"  # the form of the answer
_writers: set[str] = set()


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of one request.

    Args:
        heads: (layer, head, coefficient), without zeros.
        own: Whether each head scales its own z (JuNe) instead of the clean run's (JuICE).
        first_position: The first token that is steered.
    """

    heads: tuple[tuple[int, int, float], ...]
    own: bool = False
    first_position: int = 0

    @classmethod
    def of(cls, steering: Steering) -> Coefficients | None:
        """Return the coefficients of a steering; None where it changes nothing."""
        heads = tuple(
            (layer, head, float(value))
            for layer, values in sorted(steering.coefficients.items())
            for head, value in enumerate(values.tolist())
            if value
        )
        own = steering.report.method == "june"
        return cls(heads, own, steering.first_position) if heads else None

    @classmethod
    def read(cls, extra_args: Mapping[str, Any] | None) -> Coefficients | None:
        """Read them from a request's `extra_args`; None where it is not steered."""
        text = (extra_args or {}).get(KEY)
        return cls.from_json(text) if text else None

    @classmethod
    def from_json(cls, text: str) -> Coefficients:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        heads = tuple((layer, head, value) for layer, head, value in data.pop("heads"))
        return cls(heads, **data)

    def to_json(self) -> str:
        """Return them as text, the same for equal ones."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def cache_key(self) -> str:
        """Return what cached keys and values depend on beside their tokens."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def accept_from(writer: str) -> None:
    """Accept coefficients in this process: the writer has checked those that it writes."""
    _writers.add(writer)


def check_origin(extra_args: Mapping[str, Any] | None) -> None:
    """Raise ValueError for a request that steers where nothing of JuICE takes requests."""
    named = {KEY, FIRST, STRUCTURE, "steer"} & set(extra_args or ())
    if named and not _writers:
        raise ValueError(
            f"the request has {min(named)!r}, but vLLM runs without JuICE's middleware: start it "
            "with --middleware juice_server.vllm_middleware.Steering"
        )
