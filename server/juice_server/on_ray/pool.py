"""The replicas of one model, as the ingress sees them: whose turn it is, and passing answers on."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Scope, Send

from juice.errors import EngineStoppedError
from juice_server.clients import Client
from juice_server.errors import ANTHROPICS, failure_of, in_anthropics_words
from juice_server.on_ray.asked import Asked, without_model
from juice_server.on_ray.replica import USED
from juice_server.on_ray.turns import Turns
from juice_server.settings import Settings
from juice_server.sse import line
from juice_server.trace import Trace

LOG = logging.getLogger("juice_server")
MAX_TRIES, PAUSE_S = 3, 0.2
PASSED_ON = ("type", "asgi", "http_version", "method", "scheme", "path", "headers", "client")
RESPONSES = "/v1/responses"


class Pool:
    """The replicas of one model.

    Args:
        settings: The model's.
        handle: Calls them.
    """

    def __init__(self, settings: Settings, handle: DeploymentHandle) -> None:
        self.turns = Turns(settings.max_batch, settings.max_queue)
        self.n_replicas = 0
        self.handle = handle
        self._answers = handle.options(stream=True, method_name="answer")

    def resize(self, n_replicas: int) -> None:
        """Note how many replicas run."""
        self.n_replicas = n_replicas
        self.turns.resize(n_replicas)

    async def relay(
        self, scope: Scope, body: bytes, asked: Asked, trace: Trace, client: Client, send: Send
    ) -> float:
        """Wait for a request's turn, pass on the answer, and return the tokens that it took.

        A request whose replica is lost before it has answered goes to another one; a stream that
        has begun ends with an event of the error, and without `[DONE]`.

        Raises EngineStoppedError where nothing was sent.
        """
        async with self.turns.turn(client, asked) as use:
            answer = _Answer(scope, send)
            for n_tries in range(1, MAX_TRIES + 1):
                try:
                    use.n_tokens = await self._pass_on(scope, body, trace, client, answer)
                    break
                except RayTaskError:
                    raise
                except (RayError, RayServeException) as error:
                    LOG.warning("a replica was lost: %s", type(error).__name__)
                    if answer.has_begun:
                        await answer.break_off()
                        break
                    if n_tries == MAX_TRIES:
                        raise EngineStoppedError(LOST) from error
                    await asyncio.sleep(PAUSE_S * n_tries)
            return use.n_tokens

    async def _pass_on(
        self, scope: Scope, body: bytes, trace: Trace, client: Client, answer: _Answer
    ) -> float:
        sent: dict[str, Any] = {name: scope[name] for name in PASSED_ON if name in scope}
        sent["query_string"] = without_model(scope.get("query_string", b""))
        batches = self._answers.remote(sent, body, trace.id, client)
        try:
            async for messages in batches:
                for message in messages:
                    if message["type"] == USED:
                        return float(message["n_tokens"])
                    await answer.send(message)
        finally:
            batches.cancel()
        raise RayServeException("the replica ended without the use of tokens")


LOST = "the replica that worked on this request was lost; send it again"


class _Answer:
    """An answer on its way to the client."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.has_begun = False
        self._path: str = scope["path"]
        self._send, self._is_stream, self._n_events = send, False, 0

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        else:
            self._n_events += 1
        self.has_begun = True
        await self._send(message)

    async def break_off(self) -> None:
        """End a stream with an event of the error; raises for another answer, which breaks it."""
        error = EngineStoppedError(LOST)
        if not self._is_stream:
            raise error
        failure = failure_of(error)
        event: dict[str, Any] = failure.body()
        if self._path.startswith(ANTHROPICS):
            event = in_anthropics_words(failure)
        elif self._path.startswith(RESPONSES):
            event = {
                "type": "error",
                "sequence_number": self._n_events,
                "code": failure.code,
                "message": failure.message,
                "param": None,
            }
        await self._send({"type": "http.response.body", "body": line(event).encode()})
