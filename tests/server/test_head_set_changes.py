"""Head sets that change while servers share their folder: who may, what is refused, what is served.

Kills: a replica that keeps the old set, a request that is answered unsteered or with a mixture, two
writers who both believe that they replaced the same set, a set that is lost with a full disk.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import juice
from juice.head_set import Betas, HeadSet
from tests.support.changes import (
    ADMIN,
    USER,
    body_of,
    delete,
    etag,
    keys_file,
    put,
    what_is_in,
)
from tests.support.head_sets import sealed
from tests.support.serving import CONFLICT, LONG, Server, events, serving, within

SHIPPED = Path(__file__).parents[2] / "head_sets" / "mini"
# A look at the folder each second, and a busy machine.
SOON_S = 15


def shipped(name: str = "context", **betas: float) -> HeadSet:
    """Return a set of mini, with other betas where they are given."""
    own = HeadSet.load(SHIPPED / name)
    return own.with_betas("juice", Betas(**betas)) if betas else own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = tmp_path_factory.mktemp("shared") / "head_sets"
    shutil.copytree(SHIPPED, own / "mini")
    return own


def options(folder: Path) -> tuple[str, ...]:
    keys = keys_file(folder.parent)
    return ("--head-sets", str(folder), "--api-keys-file", str(keys), "--allow-head-set-changes")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[Server, Server]]:
    """Run two servers on one folder."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(serving(*options(folder))) for _ in range(2))
        yield one, other


@pytest.fixture(autouse=True)
def _as_shipped(request: pytest.FixtureRequest) -> Iterator[None]:
    """Put back the shipped sets after each test of the pair."""
    yield
    if "pair" in request.fixturenames:
        for server in request.getfixturevalue("pair"):
            put(server, shipped())
            delete(server, "mine")
        for server in request.getfixturevalue("pair"):
            within(SOON_S, lambda: etag(server, "context") == tag(shipped()), "as shipped")  # noqa: B023


def tag(head_set: HeadSet) -> str:
    return f'"{head_set.seal}"'


def ask(server: Server, **more: Any) -> httpx.Response:
    body = {"prompt": CONFLICT, "steer": "context", "max_tokens": 6, "logprobs": 0, **more}
    return httpx.post(f"{server.url}/generate", json=body, headers=USER, timeout=60)


def expected(head_set: HeadSet) -> juice.Completion:
    with juice.load("mini") as model:
        steers = [juice.Steer(target="context", head_set=head_set), juice.Steer(target="none")]
        steered, unsteered = model.generate([CONFLICT] * 2, steer=steers, max_tokens=6)
    assert steered.logprobs != pytest.approx(unsteered.logprobs, abs=0.05)
    return steered


def test_a_set_put_on_one_server_is_used_by_the_other_under_load(
    pair: tuple[Server, Server],
) -> None:
    """Every answer is one of the two sets' whole, as the library gives it; none is unsteered."""
    old, new = shipped(), shipped(plus=0.0, minus=-6.0)
    right = {own.betas().minus: expected(own) for own in (old, new)}
    assert right[-0.5].logprobs != pytest.approx(right[-6.0].logprobs, abs=0.05)
    end, answers = threading.Event(), list[tuple[Server, float, dict[str, Any]]]()

    def load(server: Server) -> None:
        while not end.is_set():
            begun, answer = time.monotonic(), ask(server)
            assert answer.status_code == 200, answer.text
            answers.append((server, begun, answer.json()))

    def n_with(server: Server, minus: float) -> int:
        return sum(s is server and a["steering"]["beta_minus"] == minus for s, _, a in answers)

    with ThreadPoolExecutor() as pool:
        loads = [pool.submit(load, server) for server in pair * 2]
        try:
            within(SOON_S, lambda: all(n_with(own, -0.5) > 3 for own in pair), "the old one serves")
            assert put(pair[0], new).status_code == 200
            done = time.monotonic()
            within(SOON_S, lambda: all(n_with(own, -6.0) > 3 for own in pair), "the new one serves")
        finally:
            end.set()
        for own in loads:
            own.result()
    for server, begun, answer in answers:
        report = answer["steering"]
        own = right[report["beta_minus"]]
        assert report["applied"]
        assert report["head_set"] == "context"
        assert answer["text"] == own.text
        logprobs = [token["logprob"] for token in answer["logprobs"]]
        assert logprobs == pytest.approx(own.logprobs, abs=1e-3)
        # Who has the answer to the change has the change.
        assert server is pair[1] or begun < done or report["beta_minus"] == -6.0


def test_a_removed_set_is_a_404_on_both_and_what_runs_keeps_it(pair: tuple[Server, Server]) -> None:
    body = {**LONG, "steer": "context", "stream": True}
    with httpx.stream("POST", f"{pair[1].url}/generate", json=body, headers=USER) as stream:
        assert delete(pair[0], "context").status_code == 204
        for server in pair:
            within(SOON_S, lambda: ask(server).status_code == 404, "it is gone")  # noqa: B023
            refused = ask(server).json()["error"]
            assert refused["code"] == "head_set_not_found"
            assert "removed" in refused["message"]
            assert ask(server, steer="parametric").status_code == 200
            names = httpx.get(f"{server.url}/v1/models", headers=USER).json()["data"]
            assert [own["id"] for own in names] == ["mini", "mini:parametric"]
            info = httpx.get(f"{server.url}/info", headers=USER).json()
            assert [own["name"] for own in info["steering"]["head_sets"]] == ["parametric"]
        last = events(stream)[-1]
    assert last["steering"]["applied"]
    assert last["usage"]["completion_tokens"] == LONG["max_tokens"]
    assert delete(pair[0], "context").status_code == 404
    assert put(pair[1], shipped(), if_none_match="*").status_code == 201
    for server in pair:
        within(SOON_S, lambda: ask(server).status_code == 200, "it is back")  # noqa: B023


def test_of_changes_of_one_set_at_once_exactly_one_succeeds(pair: tuple[Server, Server]) -> None:
    sets = [shipped(plus=0.0, minus=-1.0 - i) for i in range(8)]
    expects = etag(pair[0], "context")
    assert expects == tag(shipped())
    with ThreadPoolExecutor(8) as pool:
        statuses = list(
            pool.map(lambda i: put(pair[i % 2], sets[i], if_match=expects).status_code, range(8))
        )
    assert sorted(statuses) == [200, *[412] * 7]
    winner = sets[statuses.index(200)]
    for server in pair:
        within(SOON_S, lambda: etag(server, "context") == tag(winner), "the winner is served")  # noqa: B023


def test_of_new_sets_of_one_name_exactly_one_is_added(pair: tuple[Server, Server]) -> None:
    sets = [shipped(plus=0.0, minus=-1.0 - i).model_copy(update={"name": "mine"}) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        statuses = list(
            pool.map(lambda i: put(pair[i % 2], sets[i], if_none_match="*").status_code, range(8))
        )
    assert sorted(statuses) == [201, *[412] * 7]


def test_changes_and_removals_at_once_leave_a_whole_set_or_none(
    pair: tuple[Server, Server], folder: Path
) -> None:
    sets = [shipped(plus=0.0, minus=-1.0 - i).model_copy(update={"name": "mine"}) for i in range(4)]

    def change(i: int) -> int:
        server = pair[i % 2]
        own = delete(server, "mine") if i % 3 == 0 else put(server, sets[i % 4])
        return int(own.status_code)

    with ThreadPoolExecutor(8) as pool:
        statuses = set(pool.map(change, range(36)))
    assert statuses <= {200, 201, 204, 404}
    names = {path.name for path in (folder / "mini").iterdir()}
    assert names - {"mine"} == {"context", "parametric"}


def test_each_change_is_logged_and_counted(pair: tuple[Server, Server]) -> None:
    mine = shipped().model_copy(update={"name": "mine"})
    answer = put(pair[0], mine)
    assert answer.status_code == 201
    assert answer.headers["etag"] == tag(mine) == f'"{answer.json()["sha256"]}"'
    assert delete(pair[0], "mine", if_match=tag(mine)).status_code == 204
    assert f"head set added head_set=mine target=context sha256={mine.seal}" in pair[0].errors()
    assert "head set removed head_set=mine" in pair[0].errors()
    text = httpx.get(f"{pair[0].url}/metrics", headers=ADMIN).text
    assert 'juice_head_set_changes_total{change="added"}' in text


def hostile(name: str) -> tuple[str, bytes | None, int]:
    """Return the path, the body and the status of a request that must change nothing."""
    whole = body_of(shipped())
    own, path = whole["head_set"], "context"
    content = {key: value for key, value in own.items() if key != "sha256"}

    def seal(**changes: Any) -> bytes:
        return json.dumps(
            {**whole, "head_set": json.loads(sealed({**content, **changes}))}
        ).encode()

    other = {**content["model"], "fingerprint": "sha256:" + "b" * 64}
    cases: dict[str, tuple[bytes, int]] = {
        "nothing": (b"", 400),
        "not JSON": (b"{", 400),
        "no object": (b"[]", 400),
        "no set": (b'{"scores": null}', 400),
        "an unknown field": (json.dumps({**whole, "folder": "/"}).encode(), 400),
        "a field twice": (b'{"head_set": {"name": "a", "name": "b"}}', 400),
        "nested deeply": (b'{"head_set": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", 400),
        "huge": (json.dumps({**whole, "scores": "A" * 3_000_000}).encode(), 413),
        "a broken seal": (json.dumps({**whole, "head_set": {**own, "source": "x"}}).encode(), 400),
        "no seal": (json.dumps({**whole, "head_set": content}).encode(), 400),
        "the first format": (seal(format="juice.head_set/1"), 400),
        "no scores": (json.dumps({"head_set": own}).encode(), 400),
        "other scores": (json.dumps({**whole, "scores": "AAAA"}).encode(), 400),
        "scores that are not base64": (json.dumps({**whole, "scores": "*"}).encode(), 400),
        "scores without a hash": (seal(scores_sha256=None), 400),
        "another model": (seal(model=other), 422),
        "no fingerprint": (seal(model={**other, "fingerprint": None}), 422),
        "a head out of range": (seal(heads={"plus": [[99, 0]], "minus": []}), 400),
        "a negative head": (seal(heads={"plus": [[0, -1]], "minus": []}), 400),
        "a beta out of range": (seal(beta={"juice": {"plus": 1e6, "minus": 0.0}}), 400),
        "another name": (seal(name="other"), 400),
        "a name that climbs": (seal(name="../context"), 400),
    }
    if name in cases:
        return path, *cases[name]
    number = {"NaN": b"NaN", "infinity": b"1e999"}.get(name)
    if number is not None:
        return path, seal(metrics={"n": 12345.0}).replace(b"12345.0", number), 400
    return name, None, 400 if "/" not in name and "%2" not in name else 404


NAMES = ("..", ".hidden", "a" * 65, "a%0A", "%00", "caf%C3%A9", "a%2Fb", "..%2F..%2Fetc", "a/b")


@pytest.mark.parametrize("case", [
    "nothing", "not JSON", "no object", "no set", "an unknown field", "a field twice",
    "nested deeply", "huge", "a broken seal", "no seal", "the first format", "no scores",
    "other scores", "scores that are not base64", "scores without a hash", "another model",
    "no fingerprint", "a head out of range", "a negative head", "a beta out of range",
    "another name", "a name that climbs", "NaN", "infinity", *NAMES,
])  # fmt: skip
def test_a_hostile_change_is_refused_and_changes_nothing(
    pair: tuple[Server, Server], folder: Path, case: str
) -> None:
    before, (path, body, status) = what_is_in(folder.parent), hostile(case)
    head = (
        f"{{method}} /v1/head_sets/{path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer "
        "the-admin's\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body or b'')}\r\n\r\n"
    )
    for method in ("PUT",) if body is not None else ("PUT", "DELETE"):
        with pair[0].connect() as connection:
            # As it is: a client would tidy the path.
            connection.sendall(head.format(method=method).encode())
            if status != 413:  # which does not wait for the body
                connection.sendall(body or b"")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.split()[1] == str(status).encode(), answer
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert str(folder) not in error["message"]
    assert what_is_in(folder.parent) == before
    assert ask(pair[0]).json()["steering"]["applied"]


@pytest.mark.parametrize("header", ["if-match", "if-none-match"])
def test_a_condition_that_cannot_be_read_is_a_400(pair: tuple[Server, Server], header: str) -> None:
    answer = put(pair[0], shipped(), **{header: "sha256:abc"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header


def test_only_a_key_with_the_scope_may_change_anything(
    pair: tuple[Server, Server], folder: Path
) -> None:
    before = what_is_in(folder)
    url, body = f"{pair[0].url}/v1/head_sets/context", body_of(shipped(plus=0.0, minus=-3.0))
    for headers, status in ((USER, 403), ({}, 401), ({"authorization": "Bearer x"}, 401)):
        assert httpx.put(url, json=body, headers=headers).status_code == status
        assert httpx.delete(url, headers=headers).status_code == status
    assert what_is_in(folder) == before


def test_nobody_may_change_anything_unless_it_is_switched_on(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED, tmp_path / "head_sets" / "mini")
    keys, before = keys_file(tmp_path), what_is_in(tmp_path)
    given = ("--head-sets", str(tmp_path / "head_sets"))
    with serving(*given, "--api-keys-file", str(keys)) as closed, serving(*given) as without_keys:
        for server in (closed, without_keys):
            for answer in (put(server, shipped()), delete(server, "context")):
                assert answer.status_code == 405
                assert answer.headers["allow"] == "GET"
    assert what_is_in(tmp_path) == before


@pytest.mark.parametrize(
    ("keys", "sets", "message"),
    [
        ((), True, "no key may do it"),
        (("--api-key", "k"), True, "no key may do it"),
        (("--api-keys-file", "keys.toml"), False, "--head-sets"),
    ],
)
def test_a_server_that_nobody_could_change_or_everybody_does_not_start(
    tmp_path: Path, keys: tuple[str, ...], sets: bool, message: str
) -> None:
    keys_file(tmp_path)
    shutil.copytree(SHIPPED, tmp_path / "head_sets" / "mini")
    given = ("--head-sets", "head_sets") if sets else ()
    server = Server("--allow-head-set-changes", *keys, *given, folder=tmp_path)
    assert server.process.wait(timeout=120) == 2
    assert message in server.errors()
    assert "Traceback" not in server.errors()


def test_what_requests_are_steered_by_that_do_not_say_it_stays(tmp_path: Path) -> None:
    folder = tmp_path / "head_sets"
    shutil.copytree(SHIPPED, folder / "mini")
    before = what_is_in(folder)
    defaults = ("--default-steer", "context", "--default-gate", "auto")
    with serving(*options(folder), *defaults) as server:
        ungated = put(server, shipped(plus=1.0, minus=-1.0))
        for answer, said in ((ungated, "no gate"), (delete(server, "context"), "default_steer")):
            assert answer.status_code == 409
            assert said in answer.json()["error"]["message"]
            assert str(folder) not in answer.text
        assert what_is_in(folder) == before
        # By hand it can be removed; then the server goes on with what it has, and says so.
        (folder / "mini" / "context").rename(tmp_path / "context")

        def problem() -> str:
            listed = httpx.get(f"{server.url}/v1/head_sets", headers=USER).json()
            return str(listed["problem"])

        within(SOON_S, lambda: "default_steer is context" in problem(), "it is reported")
        body = {"prompt": CONFLICT, "max_tokens": 1}
        answer = httpx.post(f"{server.url}/generate", json=body, headers=USER, timeout=60)
        assert answer.json()["steering"]["head_set"] == "context"
        (tmp_path / "context").rename(folder / "mini" / "context")
        within(SOON_S, lambda: problem() == "None", "it is over")
        assert "the head sets stay as they are" in server.errors()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 256 KiB, which takes root."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small file system takes root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_is_a_507_and_loses_nothing(small_disk: Path) -> None:
    folder = small_disk / "head_sets"
    shutil.copytree(SHIPPED, folder / "mini")
    keys = keys_file(small_disk.parent)
    filler = small_disk / "filler"
    given = ("--head-sets", str(folder), "--api-keys-file", str(keys))
    with serving(*given, "--allow-head-set-changes") as server:
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
        before = what_is_in(folder)
        for head_set in (shipped(plus=0.0, minus=-3.0), shipped().model_copy(update={"name": "b"})):
            answer = put(server, head_set)
            assert answer.status_code == 507, answer.text
            assert answer.json()["error"]["code"] == "storage_full"
            assert str(small_disk) not in answer.text
        assert what_is_in(folder) == before
        assert sorted(path.name for path in (folder / "mini").iterdir()) == [
            "context",
            "parametric",
        ]
        assert ask(server).json()["steering"]["beta_minus"] == -0.5
        # A set can be removed from a full disk.
        assert delete(server, "parametric").status_code == 204
        filler.unlink()
        assert put(server, shipped(plus=0.0, minus=-3.0)).status_code == 200
        assert ask(server).json()["steering"]["beta_minus"] == -3.0


def test_a_file_that_may_not_grow_so_large_is_a_507_too(tmp_path: Path) -> None:
    """Root is not needed for this one."""
    folder = tmp_path / "head_sets"
    shutil.copytree(SHIPPED, folder / "mini")
    before = what_is_in(folder)
    large = shipped().with_metrics({"notes": "x" * 1_000_000})
    with serving(*options(folder)) as server:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (300_000, hard))
        answer = put(server, large)
        assert answer.status_code == 507, answer.text
        assert what_is_in(folder) == before
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert put(server, large).status_code == 200


def test_the_changes_are_in_the_api_document(pair: tuple[Server, Server]) -> None:
    document = httpx.get(f"{pair[0].url}/openapi.json", headers=ADMIN).json()
    own = document["paths"]["/v1/head_sets/{name}"]
    assert set(own) == {"get", "put", "delete"}
    for method in ("put", "delete"):
        assert {"403", "409", "412", "507"} <= set(own[method]["responses"])
    body = own["put"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert body.endswith("/HeadSetFiles")


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "change-head-sets.md"


def test_the_pages_calls_answer_as_it_says(tmp_path: Path) -> None:
    """The server is started as the page does, and every call in its console is made."""
    text = PAGE.read_text()
    start = next(own for own in re.findall(r"(?ms)^```sh\n(.*?)^```$", text) if "serve" in own)
    prepare, _, command = start.rpartition("juice serve ")
    (tmp_path / "head_sets").symlink_to(SHIPPED.parent)
    subprocess.run(["bash", "-ec", prepare], cwd=tmp_path, check=True)
    calls, answers = list[str](), list[str]()
    for part in re.split(r"(?m)^\$ ", "".join(re.findall(r"(?ms)^```console\n(.*?)^```$", text))):
        lines = part.splitlines()
        n = next((i for i, line in enumerate(lines, 1) if not line.endswith("\\")), 0)
        calls.append("\n".join(lines[:n]))
        answers += lines[n:]
    assert len([call for call in calls if call]) == 6
    with serving(*command.split(), folder=tmp_path) as server:
        script = "\n".join(calls).replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        done = subprocess.run(
            ["bash", "-ec", script], cwd=tmp_path, check=True, capture_output=True, text=True
        )
    assert "".join(done.stdout.split()) == "".join("".join(answers).split())
