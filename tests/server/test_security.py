"""Keys and other origins, and schemathesis on the whole OpenAPI document."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
import typer.main

from juice.cli.main import app as command_line
from juice_server.app import create
from juice_server.keys import Keys
from juice_server.settings import Settings
from tests.support.every_route import path_of, routes_of
from tests.support.serving import BEARER, KEYS, LONG, Server, serving

# What needs no key: the probes, which tell nothing else, and pages, which ask for one.
PROBES = {"/healthz", "/readyz", "/health", "/ping"}
PAGES = {"/", "/playground/{name}", "/docs", "/openapi.json", "/static-offline-docs"}


@pytest.fixture(scope="module")
def routes() -> list[tuple[str, str]]:
    """Return every route, and what is no route."""
    found = sorted(routes_of(create(Settings(), Keys(KEYS))))
    return [*found, ("GET", "/nothing"), ("OPTIONS", "/generate"), ("PUT", "/generate")]


@pytest.mark.parametrize(
    "header",
    [
        None,
        "Bearer",
        "Bearer wrong",
        "Basic first-key",
        "first-key",
        "Bearer first-key2",
        "bearer\tfirst-ke",
        "Bearer \u00fc",
        "Bearer zweiter-schlüsse",
    ],
)
def test_every_route_but_the_probes_and_pages_needs_a_key(
    server: Server, routes: list[tuple[str, str]], header: str | None
) -> None:
    headers = {} if header is None else {"authorization": header.encode("utf-8")}
    assert len(routes) > 35
    assert {"/v1/head_sets/{name}", "/docs", "/openapi.json", "/metrics"} <= {p for _, p in routes}
    for method, path in routes:
        url = f"{server.url}{path_of(path)}"
        answer = httpx.request(method, url, headers=headers, content=b"{}", timeout=60)
        if path in PROBES | PAGES:
            assert answer.status_code == 200, (method, path)
            assert path in PAGES or method == "HEAD" or list(answer.json()) == ["status"]
        elif method == "HEAD":
            assert answer.status_code == 401, path
        else:
            assert answer.status_code == 401, (method, path)
            error = answer.json()["error"]
            assert error.get("code", error["type"]) in ("invalid_api_key", "authentication_error")
            assert answer.headers["www-authenticate"] == "Bearer"


def test_a_browser_opens_the_page_of_the_routes_without_a_key(server: Server) -> None:
    """It sends no header when it opens a page; what the page then asks for has one."""
    page = httpx.get(f"{server.url}/docs")
    assert page.status_code == 200
    files = re.findall(r"(?:src|href)=\"(/[^\"]+)\"", page.text)
    assert len(files) >= 2
    for path in (*files, "/openapi.json"):
        assert httpx.get(f"{server.url}{path}").status_code == 200, path
    for path in ("/static-offline-docs/../info", "/static-offline-docs/%2e%2e/info"):
        assert httpx.get(f"{server.url}{path}").status_code in (401, 404), path


def test_each_key_is_accepted_and_none_is_revealed(server: Server) -> None:
    for key in KEYS:
        answer = httpx.get(
            f"{server.url}/info", headers={"authorization": f"Bearer {key}".encode()}
        )
        assert answer.status_code == 200
        assert not any(secret in answer.text for secret in KEYS)
    assert not any(key in server.errors() for key in KEYS)


@pytest.mark.parametrize(
    ("environment", "arguments"),
    [
        ({"JUICE_API_KEYS": ""}, ()),
        ({"JUICE_API_KEYS": " , "}, ()),
        ({}, ("--api-key", "")),
        ({}, ("--api-key", " k")),
        ({"JUICE_API_KEY": "singular"}, ()),
    ],
)
def test_a_key_setting_that_is_empty_or_misspelt_does_not_open_the_server(
    environment: dict, arguments: tuple[str, ...]
) -> None:
    server = Server(*arguments, environment=environment)
    assert server.process.wait(timeout=60) == 2
    assert "JUICE_API_KEYS" in server.errors()


def test_a_body_that_drips_in_after_its_refusal_is_cut_off() -> None:
    with (
        serving("--api-key", "k", "--header-timeout", "1", "--body-timeout", "1") as server,
        server.connect() as connection,
    ):
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
        for _ in range(40):
            try:
                connection.sendall(b"1\r\n \r\n")
            except OSError:
                break
            time.sleep(0.25)
        else:
            pytest.fail("the connection is still open")


def test_pages_of_other_origins_are_allowed_only_when_named(server: Server) -> None:
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    named = httpx.options(
        f"{server.url}/generate", headers={"origin": "https://a.example", **preflight}
    )
    assert named.headers["access-control-allow-origin"] == "https://a.example"
    other = httpx.options(
        f"{server.url}/generate", headers={"origin": "https://b.example", **preflight}
    )
    assert "access-control-allow-origin" not in other.headers


def refusals(url: str, key: str, limited: str) -> dict[int, httpx.Response]:
    """Return the answers to a page that sends what is refused, by the status that is expected."""

    def post(body: object, key: str = key) -> httpx.Response:
        headers = {"origin": "https://a.example", "authorization": f"Bearer {key}"}
        return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)

    short = {"model": "mini", "prompt": "x", "max_tokens": 1}
    post(short, limited)
    return {
        400: post({**short, "max_tokens": 0}),
        401: post(short, "wrong"),
        404: post({**short, "model": "gpt-9"}),
        413: post({**short, "prompt": "x" * 30_000}),
        429: post(short, limited),
        503: post({"model": "mini", **LONG, "n": 8}),
    }


@pytest.mark.parametrize("origins", ["https://a.example,https://c.example", "*", ""])
def test_a_page_reads_every_refusal_where_its_origin_is_allowed_and_none_elsewhere(
    origins: str, tmp_path: Path
) -> None:
    """Kills: errors that a browser hides from its page, which sees nothing but a failed fetch."""
    keys = tmp_path / "keys.toml"
    digests = {name: sha256(name.encode()).hexdigest() for name in ("free", "limited")}
    keys.write_text(
        f'[[keys]]\nname = "free"\nsha256 = "{digests["free"]}"\n'
        f'[[keys]]\nname = "limited"\nsha256 = "{digests["limited"]}"\nrequests_per_minute = 1\n'
    )
    options = ("--api-keys-file", str(keys), "--max-body", "20KB", "--request-timeout", "0.5")
    allowed = {"": None, "*": "*"}.get(origins, "https://a.example")
    with serving(*options, *(("--cors-origins", origins) if origins else ())) as running:
        for status, answer in refusals(running.url, "free", "limited").items():
            assert answer.status_code == status, answer.text
            assert answer.headers.get("access-control-allow-origin") == allowed
            exposed = answer.headers.get("access-control-expose-headers", "")
            assert ("retry-after" in exposed) == (allowed is not None)
        preflight = {
            "origin": "https://a.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        for path in ("/v1/chat/completions", "/generate", "/metrics", "/nothing"):
            answer = httpx.options(f"{running.url}{path}", headers=preflight)
            assert answer.headers.get("access-control-allow-origin") == allowed
            assert answer.status_code == (200 if allowed else 401)


def test_every_setting_is_a_flag_and_every_flag_a_setting() -> None:
    command = typer.main.get_command(command_line).commands["serve"]
    flags = {parameter.name for parameter in command.params} - {"help"}
    assert flags - {"api_key"} | {"api_keys"} == set(Settings.model_fields)


@pytest.mark.parametrize("n", [2, pytest.param(50, marks=pytest.mark.long)])
def test_schemathesis_finds_no_5xx_and_no_answer_that_is_not_documented(
    n: int, tmp_path: Path
) -> None:
    """Every route gets values that fit the served OpenAPI document, and values that do not."""
    with serving("--max-tokens", "20", "--log-format", "json") as server:
        options = (
            # With several workers, Python 3.11 may lose count in its parser.
            "--checks not_a_server_error,response_schema_conformance,content_type_conformance"
            ",status_code_conformance --seed 1 --workers 1"
            " --suppress-health-check all --no-color"
        )
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *options.split(),
            *("--max-examples", str(n)),
        ]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
        )
        errors = [line for line in server.log() if line["level"] == "error"]
        assert done.returncode == 0, (errors, done.stdout[-6000:], done.stderr[-2000:])
        n_cases, n_passed = re.search(r"(\d+) generated, (\d+) passed", done.stdout).groups()
        assert n_cases == n_passed
        assert int(n_passed) > 40 * n


def test_a_page_that_leads_its_own_host_here_reads_nothing() -> None:
    """Kills: DNS rebinding of a server that answers everybody, since nobody else can reach it."""
    with serving("--allowed-hosts", "Proxy.example, other.example") as server:

        def status(host: str | None, path: str = "/info") -> int:
            line = "" if host is None else f"host: {host}\r\n"
            version = "1.0" if host is None else "1.1"
            with server.connect() as connection:
                connection.sendall(f"GET {path} HTTP/{version}\r\n{line}\r\n".encode())
                return int(connection.recv(4096).split()[1])

        own = ("localhost", f"127.0.0.1:{server.port}", "[::1]:8000", "LOCALHOST.", "a.localhost")
        assert [status(host) for host in (*own, None)] == [200] * 6
        assert [status(host) for host in ("proxy.example:80", "OTHER.example")] == [200] * 2
        others = (
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "",
        )
        for path in ("/info", "/", "/metrics", "/generate", "/no"):
            assert [status(host, path) for host in others] == [403] * 5, path
        assert status("evil.example", "/healthz") == 200, "a probe"
        answer = httpx.post(
            f"{server.url}/generate", json={"prompt": "x"}, headers={"host": "evil.example:8000"}
        )
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "'evil.example:8000'" in answer.json()["error"]["message"]
        assert "x-request-id" in answer.headers


@pytest.mark.parametrize(
    "options",
    [("--host", "0.0.0.0"), ("--api-key", KEYS[0]), ("--allowed-hosts", "*")],  # noqa: S104
)
def test_any_host_may_be_asked_for_with_a_key_from_elsewhere_or_where_that_is_allowed(
    options: tuple[str, ...],
) -> None:
    with serving(*options) as server:
        headers = {"host": "any.example", **BEARER}
        assert httpx.get(f"{server.url}/info", headers=headers).status_code == 200
