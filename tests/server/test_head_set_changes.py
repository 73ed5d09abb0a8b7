"""Head sets that change while servers share their folder: what is served, logged and refused.

Kills: a replica that keeps the old set, a request that is answered unsteered or with a mixture.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

import juice
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Betas
from tests.support.serving import CONFLICT, LONG, Server, events, serving, within

SHIPPED = Path(__file__).parents[2] / "head_sets" / "mini"
# A look at the folder each second, and a busy machine.
SOON_S = 15


def shipped(name: str = "context", **betas: float) -> HeadSet:
    """Return a set of mini, with other betas where they are given."""
    as_shipped = HeadSet.load(SHIPPED / name)
    return as_shipped.with_betas("juice", Betas(**betas)) if betas else as_shipped


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shared = tmp_path_factory.mktemp("shared") / "head_sets"
    shutil.copytree(SHIPPED, shared / "mini")
    return shared


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[Server, Server]]:
    """Run two servers on one folder."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(serving("--head-sets", str(folder))) for _ in range(2))
        yield one, other


@pytest.fixture(autouse=True)
def _as_shipped(request: pytest.FixtureRequest) -> Iterator[None]:
    """Put back the shipped set after each test of the pair."""
    yield
    if "pair" in request.fixturenames:
        put(request.getfixturevalue("folder"), shipped())
        for server in request.getfixturevalue("pair"):
            within(SOON_S, lambda: seal_of(server) == shipped().seal, "as shipped")  # noqa: B023


def put(folder: Path, head_set: HeadSet) -> None:
    """Save a set into the folder that the servers share."""
    head_set.save(folder / "mini" / head_set.name, overwrite=True)


def seal_of(server: Server, name: str = "context") -> str | None:
    """Return the hash of the set that a server serves under a name."""
    answer = httpx.get(f"{server.url}/v1/head_sets/{name}", timeout=60)
    return answer.json().get("sha256")


def ask(server: Server, **more: Any) -> httpx.Response:
    body = {"prompt": CONFLICT, "steer": "context", "max_tokens": 6, "logprobs": 0, **more}
    return httpx.post(f"{server.url}/generate", json=body, timeout=60)


def expected(head_set: HeadSet) -> juice.Completion:
    with juice.load("mini") as model:
        steers = [juice.Steer(target="context", head_set=head_set), juice.Steer(target="none")]
        steered, unsteered = model.generate([CONFLICT] * 2, steer=steers, max_tokens=6)
    assert steered.logprobs != pytest.approx(unsteered.logprobs, abs=0.05)
    return steered


def test_a_set_that_is_replaced_is_used_by_every_server_under_load(
    pair: tuple[Server, Server], folder: Path
) -> None:
    """Every answer is one of the two sets' whole, as the library gives it; none is unsteered."""
    old, new = shipped(), shipped(plus=0.0, minus=-6.0)
    right = {each.betas().minus: expected(each) for each in (old, new)}
    assert right[-0.5].logprobs != pytest.approx(right[-6.0].logprobs, abs=0.05)
    end, answers = threading.Event(), list[tuple[Server, dict[str, Any]]]()

    def load(server: Server) -> None:
        while not end.is_set():
            answer = ask(server)
            assert answer.status_code == 200, answer.text
            answers.append((server, answer.json()))

    def n_with(server: Server, minus: float) -> int:
        return sum(s is server and a["steering"]["beta_minus"] == minus for s, a in answers)

    with ThreadPoolExecutor() as pool:
        loads = [pool.submit(load, server) for server in pair * 2]
        try:
            within(
                SOON_S, lambda: all(n_with(each, -0.5) > 3 for each in pair), "the old one serves"
            )
            put(folder, new)
            within(
                SOON_S, lambda: all(n_with(each, -6.0) > 3 for each in pair), "the new one serves"
            )
        finally:
            end.set()
        for item in loads:
            item.result()
    for _, answer in answers:
        report = answer["steering"]
        item = right[report["beta_minus"]]
        assert report["applied"]
        assert report["head_set"] == "context"
        assert answer["text"] == item.text
        logprobs = [token["logprob"] for token in answer["logprobs"]]
        assert logprobs == pytest.approx(item.logprobs, abs=1e-3)


def test_a_removed_set_is_a_404_on_both_and_what_runs_keeps_it(
    pair: tuple[Server, Server], folder: Path
) -> None:
    body = {**LONG, "steer": "context", "stream": True}
    with httpx.stream("POST", f"{pair[1].url}/generate", json=body) as stream:
        shutil.rmtree(folder / "mini" / "context")
        for server in pair:
            within(SOON_S, lambda: ask(server).status_code == 404, "it is gone")  # noqa: B023
            refused = ask(server).json()["error"]
            assert refused["code"] == "head_set_not_found"
            assert "removed" in refused["message"]
            assert ask(server, steer="parametric").status_code == 200
            names = httpx.get(f"{server.url}/v1/models").json()["data"]
            assert [name["id"] for name in names] == ["mini", "mini:parametric"]
            info = httpx.get(f"{server.url}/info").json()
            assert [head_set["name"] for head_set in info["steering"]["head_sets"]] == [
                "parametric"
            ]
        last = events(stream)[-1]
    assert last["steering"]["applied"]
    assert last["usage"]["completion_tokens"] == LONG["max_tokens"]
    put(folder, shipped())
    for server in pair:
        within(SOON_S, lambda: ask(server).status_code == 200, "it is back")  # noqa: B023


def test_each_change_is_logged_and_counted(pair: tuple[Server, Server], folder: Path) -> None:
    mine = shipped().model_copy(update={"name": "mine"})
    put(folder, mine)
    within(SOON_S, lambda: seal_of(pair[0], "mine") == mine.seal, "it is added")
    shutil.rmtree(folder / "mini" / "mine")
    within(SOON_S, lambda: seal_of(pair[0], "mine") is None, "it is removed")
    assert f"head set added head_set=mine target=context sha256={mine.seal}" in pair[0].errors()
    assert "head set removed head_set=mine" in pair[0].errors()
    text = httpx.get(f"{pair[0].url}/metrics").text
    assert 'juice_head_set_changes_total{change="added"}' in text


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH"])
def test_head_sets_change_by_their_folder_alone(client: httpx.Client, method: str) -> None:
    answer = client.request(method, "/v1/head_sets/context", json={})
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET"


def test_a_folder_without_the_servers_defaults_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "head_sets"
    shutil.copytree(SHIPPED, folder / "mini")
    defaults = ("--default-steer", "context", "--default-gate", "auto")
    with serving("--head-sets", str(folder), *defaults) as server:

        def problem() -> str:
            listed = httpx.get(f"{server.url}/v1/head_sets").json()
            return str(listed["problem"])

        put(folder, shipped(plus=1.0, minus=-1.0))
        within(SOON_S, lambda: "no gate" in problem(), "it is reported")
        assert seal_of(server) == shipped().seal
        shutil.rmtree(folder / "mini" / "context")
        within(SOON_S, lambda: "default_steer is context" in problem(), "it is reported")
        assert str(folder) not in problem()
        body = {"prompt": CONFLICT, "max_tokens": 1}
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
        assert answer.json()["steering"]["head_set"] == "context"
        put(folder, shipped())
        within(SOON_S, lambda: problem() == "None", "it is over")
        assert "the head sets stay as they are" in server.errors()
