"""An engine without a model: it answers each request with the same words.

It has no capabilities, so whatever works on it needs nothing but the contract.
"""

from __future__ import annotations

from functools import cached_property
from threading import Thread
from typing import ClassVar

from juice.engine.answer import Completion, ScoredToken, Sink, Timing, Update
from juice.engine.contract import Engine, ModelDescription, Status
from juice.engine.load_options import Limits
from juice.engine.request import Request, Running
from juice.engine.steer import Steering
from juice.errors import CancelledError, EngineStoppedError, JuiceError
from juice.head_set.schema import ModelIdentity
from tests.support import tiny

WORDS = ("one ", "two ", "three")


class CannedRequest:
    """A submitted request."""

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request, self.sink = request, sink
        self.cancelled: JuiceError | None = None

    def cancel(self, reason: JuiceError | None = None) -> None:
        self.cancelled = reason or CancelledError("the request was cancelled")

    def run(self) -> None:
        tokens = tuple(ScoredToken(i, -0.5, ((i, -0.5),)) for i, _ in enumerate(WORDS))
        for token, word in zip(tokens, WORDS, strict=True):
            if self.cancelled is not None:
                self.sink(Update(index=self.request.index, error=self.cancelled))
                return
            self.sink(Update(index=self.request.index, text=word, tokens=(token,)))
        completion = Completion(
            text="".join(WORDS),
            tokens=tokens,
            finish_reason="stop",
            steering=self.request.steering.report,
            n_prompt_tokens=len(self.request.prompt_ids),
            timing=Timing(queued_s=0.0, tokens_s=(0.1, 0.2, 0.3)),
        )
        self.sink(Update(index=self.request.index, completion=completion))


class CannedEngine(Engine):
    """The engine; `submitted` is every request that it has taken."""

    name: ClassVar[str] = "canned"

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits(max_model_len=80)
        self.submitted: list[CannedRequest] = []
        self.is_closed = False

    @cached_property
    def description(self) -> ModelDescription:
        identity = ModelIdentity(
            id="canned", architecture="LlamaForCausalLM", n_layers=4, n_heads=4, fingerprint=None
        )
        return ModelDescription(
            identity=identity,
            tokenizer=TOKENIZER,
            heads_per_layer=(4, 4, 4, 4),
            dtype="float32",
            device="nowhere",
            max_positions=80,
            vocabulary_size=tiny.VOCAB_SIZE,
            stop_token_ids=frozenset({0}),
        )

    @property
    def status(self) -> Status:
        return Status(
            is_alive=not self.is_closed,
            heartbeat_age_s=0.0,
            n_running=0,
            n_waiting=0,
            n_kv_bytes=0,
            max_kv_bytes=1,
        )

    @property
    def n_kv_bytes_per_token(self) -> int:
        return 16

    def n_kv_bytes(self, request: Request) -> int:  # noqa: ARG002
        return 0

    def companion_layers(self, steering: Steering) -> range:
        return steering.window

    def start(
        self,
        request: Request,
        sink: Sink,
        *,
        instead_of: Running | None = None,  # noqa: ARG002
    ) -> CannedRequest:
        if self.is_closed:
            raise EngineStoppedError("the engine was closed")
        made = CannedRequest(request, sink)
        self.submitted.append(made)
        Thread(target=made.run, daemon=True).start()
        return made

    def close(self) -> None:
        self.is_closed = True


class HeldEngine(CannedEngine):
    """An engine whose requests run when a test says so (`CannedRequest.run`)."""

    def start(
        self,
        request: Request,
        sink: Sink,
        *,
        instead_of: Running | None = None,  # noqa: ARG002
    ) -> CannedRequest:
        self.submitted.append(CannedRequest(request, sink))
        return self.submitted[-1]


TOKENIZER = tiny.tiny_tokenizer()
