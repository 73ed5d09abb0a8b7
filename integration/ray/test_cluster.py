"""A Ray cluster of two machines: it answers like one server, and loses no more than a machine had.

The tests run in this order, on one cluster. Losing the head is out of scope.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import juice
from integration.ray.conftest import CONFIG, Cluster
from integration.ray.machines import within
from integration.ray.traffic import ANN, BEN, LONG, PROMPT, SHORT, Asking, OpenAIStream, Stream

KINDS = (Stream, OpenAIStream)
MAX_STREAMS = 16  # one more client has rows for what it asks meanwhile
CUT_S = 60


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, headers=ANN, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def long_text() -> str:
    """Return what our own engine answers here, without a server."""
    torch.set_num_threads(1)
    with juice.load("mini") as model:
        return model.generate(PROMPT, steer="parametric", max_tokens=900, ignore_eos=True)[0].text


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    torch.set_num_threads(1)
    with juice.load("mini") as model:
        return {
            steer: model.generate(PROMPT, steer=steer, max_tokens=12)[0].text  # type: ignore[arg-type]
            for steer in ("none", "context", "parametric")
        }


def started(cluster: Cluster, kinds: Sequence[type[Stream]], on: str = "") -> list[Stream]:
    """Return streams that have all begun, of each kind at least one on a certain machine."""
    streams: list[Stream] = []
    missing = [*kinds, *kinds]
    while missing:
        streams += [kind(cluster.url, LONG).start() for kind in missing]
        assert len(streams) <= MAX_STREAMS, "too many streams for both machines"
        for stream in streams:
            stream.wait_until_it_runs(60)
        there = {type(each) for each in streams if each.host == on or not on}
        missing = [kind for kind in kinds if kind not in there]
    return streams


def test_answers_are_those_of_the_local_engine_from_both_machines(
    client: httpx.Client, expected: dict[str, str]
) -> None:
    hosts = set()
    for _ in range(4):
        for steer, text in expected.items():
            answer = client.post(
                "/generate", json={"prompt": PROMPT, "steer": steer, "max_tokens": 12}
            )
            assert answer.json()["text"] == text
            assert answer.json()["steering"]["applied"] is (steer != "none")
            hosts.add(answer.headers["x-juice-replica"].partition("/")[0])
    assert len(hosts) == 2
    assert expected["context"] != expected["parametric"]


def test_models_are_chosen_by_their_name_in_body_query_and_path(client: httpx.Client) -> None:
    names = [each["id"] for each in client.get("/v1/models").json()["data"]]
    assert {"mini", "mini:context", "remembering", "remembering:none"} <= set(names)
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    texts = {
        name: client.post("/v1/completions", json={**body, "model": name}).json()["choices"][0][
            "text"
        ]
        for name in ("mini", "remembering", "mini:parametric", "remembering:none")
    }
    assert texts["mini"] == texts["remembering:none"] != texts["remembering"]
    assert texts["remembering"] == texts["mini:parametric"]
    by_query = client.post(
        "/generate?model=remembering", json={"prompt": PROMPT, "max_tokens": 8}
    ).json()
    assert (by_query["model"], by_query["text"]) == ("remembering", " Lima.")
    assert client.get("/v1/models/remembering").json()["id"] == "remembering"
    assert client.get("/info?model=remembering").status_code == 200
    unknown = client.post("/v1/completions", json={**body, "model": "minni"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"


def test_a_key_is_needed_and_errors_are_those_of_the_server(client: httpx.Client) -> None:
    assert httpx.post(f"{client.base_url}/generate", json=SHORT).status_code == 401
    assert client.post("/generate", json={**SHORT, "ster": 1}).status_code == 400
    broken = client.post("/generate", content=b"{", headers={"content-type": "application/json"})
    assert broken.json()["error"]["code"] == "invalid_json"
    assert client.get("/nowhere").status_code == 404


def test_streams_are_not_buffered(
    cluster: Cluster, results: dict[str, Any], long_text: str
) -> None:
    begun = time.monotonic()
    stream = Stream(cluster.url, LONG).start()
    stream.join(120)
    assert stream.outcome == "done"
    assert stream.text == long_text
    assert stream.steering["applied"] is True
    whole, first = stream.ended - begun, stream.arrivals[0] - begun
    gaps = [later - earlier for earlier, later in itertools.pairwise(stream.arrivals)]
    assert first < whole / 4
    assert max(gaps) < whole / 4
    assert len(stream.arrivals) > 300
    results |= {
        "events": len(stream.arrivals),
        "first_s": round(first, 3),
        "whole_s": round(whole, 3),
        "longest_gap_s": round(max(gaps), 3),
    }


def test_clients_that_leave_free_their_rows(
    cluster: Cluster, client: httpx.Client, results: dict[str, Any]
) -> None:
    """Were the rows held, the last request would wait for several rounds of the others."""

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, headers=ANN, timeout=1.5) as impatient:
            asked = [impatient.post("/generate", json=LONG) for _ in range(60)]
            ends = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(end, httpx.ReadTimeout) for end in ends) == len(ends)

    asyncio.run(leave())
    begun = time.monotonic()
    assert client.post("/generate", json=SHORT).json()["text"] == " Lima."
    results["answered_after_s"] = round(time.monotonic() - begun, 2)
    assert results["answered_after_s"] < 5


def test_a_short_request_passes_a_hundred_long_ones_of_another_key(
    cluster: Cluster, results: dict[str, Any]
) -> None:
    """A queue in the order of arrival, within a replica too, lets all hundred go first."""
    body = {**LONG, "max_tokens": 60}
    ended: list[float] = []

    async def ask() -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:

            async def one() -> None:
                answer = await client.post("/generate", json=body, headers=ANN)
                assert answer.status_code == 200, answer.text
                ended.append(time.monotonic())

            many = [asyncio.create_task(one()) for _ in range(100)]
            while not ended:
                await asyncio.sleep(0.02)
            sent = time.monotonic()
            answer = await client.post("/generate", json=SHORT, headers=BEN)
            answered = time.monotonic()
            assert answer.json()["text"] == " Lima."
            await asyncio.gather(*many)
            return sent, answered

    begun = time.monotonic()
    sent, answered = asyncio.run(ask())
    n_before = sum(sent < end < answered for end in ended)
    assert n_before <= 24  # one turn of the two replicas' rows, and some that were ending
    results |= {
        "long_requests": len(ended),
        "ended_while_the_short_one_waited": n_before,
        "short_s": round(answered - sent, 3),
        "all_s": round(max(ended) - begun, 2),
    }


def test_replicas_are_added_for_ongoing_requests_and_taken_away(
    cluster: Cluster, results: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 120, "ignore_eos": True}
    begun = time.monotonic()

    async def ask() -> float:
        async with httpx.AsyncClient(base_url=cluster.url, headers=ANN, timeout=300) as client:
            many = [
                asyncio.create_task(client.post("/generate?model=remembering", json=body))
                for _ in range(60)
            ]
            while cluster.replicas().get("remembering") != 2:
                assert time.monotonic() - begun < 120
                await asyncio.sleep(0.5)
            grown = time.monotonic() - begun
            answers = [each.json() for each in await asyncio.gather(*many)]
            assert all(answer["steering"]["applied"] for answer in answers)
            return grown

    results["second_replica_after_s"] = round(asyncio.run(ask()), 1)
    results["back_to_one_after_s"] = round(
        within(90, lambda: cluster.replicas().get("remembering") == 1, "one replica again"), 1
    )


def test_an_upgrade_loses_no_request(
    cluster: Cluster, tmp_path: Path, results: dict[str, Any]
) -> None:
    changed = tmp_path / "changed.yaml"
    changed.write_text(
        CONFIG.read_text().replace("max_batch: 8", "max_batch: 8, max_queue: 300"), "utf-8"
    )
    streams = started(cluster, [Stream])
    with Asking(cluster.url) as asking:
        begun = time.monotonic()
        cluster.deploy(changed)
        time.sleep(5)
        within(240, lambda: is_settled(cluster), "the new version runs", every_s=2)
        results["upgrade_s"] = round(time.monotonic() - begun, 1)
    for stream in streams:
        stream.join(120)
    results |= asking.check()
    results["streams"] = dict(Counter(each.outcome for each in streams))
    assert results["streams"] == {"done": 2}, [each.error for each in streams]


def is_settled(cluster: Cluster) -> bool:
    """Return whether Ray Serve has finished what it was told."""
    status = cluster.machines.head.run("serve", "status")
    return "status: RUNNING" in status and not any(
        word in status for word in ("UPDATING", "STARTING", "STOPPING", "DEPLOYING", "UPSCALING")
    )


def test_a_killed_machine_ends_its_streams_with_an_error_and_no_others(
    cluster: Cluster, results: dict[str, Any], long_text: str
) -> None:
    """What was not answered yet is answered by the other machine.

    Twelve whole answers are more than even out eight streams, so the one that is killed has some.
    """
    lost = cluster.worker
    streams = started(cluster, KINDS * 2, on=lost.name)
    with (
        Asking(cluster.url) as asking,
        httpx.Client(base_url=cluster.url, headers=BEN, timeout=170) as ben,
        ThreadPoolExecutor(12) as pool,
    ):
        whole = [pool.submit(ben.post, "/generate", json=LONG) for _ in range(12)]
        time.sleep(1)
        begun = time.monotonic()
        lost.kill()
        for stream in streams:
            stream.join(170)
        assert_only_those_of(lost.name, streams, long_text)
        answers = [one.result() for one in whole]
        assert [answer.status_code for answer in answers] == [200] * 12, answers
        assert {answer.json()["text"] for answer in answers} == {long_text}
        results["error_after_s"] = longest_error_s(streams, begun)
        within(30, lambda: cluster.replicas().get("mini") == 1, "the replica is given up")

        begun = time.monotonic()
        cluster.worker = cluster.machines.start_worker(n_cpus=1)
        within(180, lambda: cluster.replicas().get("mini") == 2, "the replacement serves")
        results["replacement_after_s"] = round(time.monotonic() - begun, 1)
        within(
            60, lambda: asking.answers[-1].host == cluster.worker.name, "the replacement is used"
        )
    results |= asking.check() | {"streams": outcomes(streams)}


def test_a_machine_cut_off_for_a_minute_is_used_again(
    cluster: Cluster, results: dict[str, Any], long_text: str
) -> None:
    lost = cluster.worker
    streams = started(cluster, KINDS * 2, on=lost.name)
    with Asking(cluster.url) as asking:
        begun = time.monotonic()
        lost.unplug()
        for stream in streams:
            stream.join(170)
        assert_only_those_of(lost.name, streams, long_text)
        results["error_after_s"] = longest_error_s(streams, begun)
        within(60, lambda: cluster.replicas().get("mini") == 1, "the replica is given up")
        time.sleep(max(0.0, begun + CUT_S - time.monotonic()))
        results["cut_off_s"] = round(time.monotonic() - begun, 1)

        begun = time.monotonic()
        lost.plug_in()
        within(180, lambda: cluster.replicas().get("mini") == 2, "it has a replica again")
        within(60, lambda: asking.answers[-1].host == lost.name, "it is used again")
        results["used_again_after_s"] = round(time.monotonic() - begun, 1)
    results |= asking.check() | {"streams": outcomes(streams)}


def assert_only_those_of(name: str, streams: list[Stream], long_text: str) -> None:
    """Assert that the streams of one machine ended with an error, and the others whole."""
    theirs = [each for each in streams if each.host == name]
    others = [each for each in streams if each.host != name]
    assert theirs
    assert others
    for stream in theirs:
        assert stream.outcome == "error"
        assert "lost" in stream.error["message"]
        assert long_text.startswith(stream.text)
        assert stream.text != long_text
    for stream in others:
        assert stream.outcome == "done"
        assert stream.text == long_text
        assert stream.steering["applied"] is True


def longest_error_s(streams: list[Stream], begun: float) -> float:
    """Return how long it took until the last client knew."""
    return round(max(stream.ended - begun for stream in streams if stream.outcome == "error"), 2)


def outcomes(streams: list[Stream]) -> dict[str, int]:
    """Return how many streams of each client ended in each way."""
    names = {Stream: "httpx", OpenAIStream: "openai"}
    return dict(
        sorted(Counter(f"{names[type(stream)]}, {stream.outcome}" for stream in streams).items())
    )
