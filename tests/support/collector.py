"""A collector of OpenTelemetry traces, as a process: it writes each span as a JSON line.

`python -m tests.support.collector grpc PORT FILE`, or http instead of grpc.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.support.serving import free_port

KINDS = {1: "internal", 2: "server"}
STATUSES = {0: "unset", 1: "ok", 2: "error"}


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(each) for each in value.array_value.values]
    return getattr(value, kind)


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: plain(pair.value) for pair in pairs}


def spans(request: ExportTraceServiceRequest) -> Iterator[dict[str, Any]]:
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield {
                    "name": span.name,
                    "kind": KINDS[span.kind],
                    "trace": span.trace_id.hex(),
                    "id": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(),
                    "start": span.start_time_unix_nano,
                    "end": span.end_time_unix_nano,
                    "status": STATUSES[span.status.code],
                    "attributes": attributes(span.attributes),
                    "resource": attributes(resource.resource.attributes),
                }


class Collector:
    """What a collector has got so far."""

    def __init__(self, url: str, file: Path) -> None:
        self.url, self._file = url, file

    def spans(self) -> list[dict[str, Any]]:
        # The last line may be half written.
        whole, _, _ = self._file.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for(self, n: int) -> list[dict[str, Any]]:
        """Return the spans once there are so many."""
        deadline = time.monotonic() + 20
        while len(got := self.spans()) < n:
            assert time.monotonic() < deadline, f"{len(got)} of {n} spans: {got}"
            time.sleep(0.05)
        return got


@contextmanager
def collecting(protocol: str, folder: Path) -> Iterator[Collector]:
    """Run a collector for the block."""
    port, file = free_port(), folder / f"{protocol}.jsonl"
    command = [sys.executable, "-m", __name__, protocol, str(port), str(file)]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 30
        while not file.exists():
            assert time.monotonic() < deadline, "the collector did not start"
            time.sleep(0.05)
        path = "/v1/traces" if protocol == "http" else ""
        yield Collector(f"http://127.0.0.1:{port}{path}", file)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def main(protocol: str, port: int, file: Path) -> None:
    def keep(request: ExportTraceServiceRequest) -> None:
        with file.open("a") as lines:
            lines.writelines(json.dumps(span) + "\n" for span in spans(request))

    class OverGrpc(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:  # noqa: ARG002, N802
            keep(request)
            return ExportTraceServiceResponse()

    class OverHttp(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            keep(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

    if protocol == "grpc":
        server = grpc.server(ThreadPoolExecutor(1))  # lines of two would mix
        add_TraceServiceServicer_to_server(OverGrpc(), server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        file.touch()
        server.wait_for_termination()
    else:
        listening = HTTPServer(("127.0.0.1", port), OverHttp)
        file.touch()
        listening.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
