"""What a server's settings allow of heads that come in a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import Serve
from tests.server.test_inline import BY_COEFFICIENT, BY_SIGN
from tests.server.test_steer_doors import DOORS


@pytest.fixture(scope="module")
def bounded(served: Serve) -> Iterator[httpx.Client]:
    options = ("--max-inline-heads", "6", "--max-inline-coefficient", "2", "--default-gate", "auto")
    with httpx.Client(base_url=served(*options).url, timeout=60) as made:
        yield made


def ask(client: httpx.Client, steer: dict[str, Any]) -> Any:
    return client.post("/generate", json={**DOORS["/generate"], "steer": steer}).json()


def test_a_server_bounds_heads_and_their_size(bounded: httpx.Client) -> None:
    assert "Lima" in ask(bounded, BY_SIGN)["text"]
    more = {"coefficients": [*BY_COEFFICIENT["coefficients"], [0, 0, 1.0]]}
    error = ask(bounded, more)["error"]
    assert (error["param"], "at most 6" in error["message"]) == ("steer.coefficients", True)
    error = ask(bounded, {**BY_SIGN, "strength": [1, 1.5]})["error"]
    assert (error["param"], "2.25" in error["message"]) == ("steer.heads", True)


def test_the_default_gate_is_for_head_sets_alone_and_the_report_says_so(
    bounded: httpx.Client,
) -> None:
    assert ask(bounded, {"target": "parametric"})["steering"]["gate"] is not None
    for steer in (
        BY_SIGN,
        {"target": "parametric", "positions": "last"},
        {"target": "parametric", "strength": [1, 0.5]},
    ):
        report = ask(bounded, steer)["steering"]
        assert report["applied"] is True
        assert report["gate"] is None
        assert [w for w in report["warnings"] if "without a gate" in w]
        off = ask(bounded, {**steer, "gate": "off"})["steering"]
        assert not [w for w in off["warnings"] if "gate" in w]


def test_a_server_can_take_no_heads(served: Serve) -> None:
    with httpx.Client(base_url=served("--max-inline-heads", "0").url, timeout=60) as client:
        for steer in (BY_SIGN, BY_COEFFICIENT):
            assert "--max-inline-heads" in ask(client, steer)["error"]["message"]
        assert "Lima" in ask(client, {"target": "parametric", "strength": [1, 1]})["text"]
