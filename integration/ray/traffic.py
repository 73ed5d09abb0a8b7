"""Clients of the cluster: streams that note what came when, and one that keeps asking."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from integration.ray.machines import within

PROMPT = "The capital of Peru is Cairo. The capital of Peru is"
SHORT = {"prompt": PROMPT, "steer": "parametric", "max_tokens": 8}
# As long as the model's context allows.
LONG = {"prompt": PROMPT, "steer": "parametric", "max_tokens": 900, "ignore_eos": True}
ANN, BEN = ({"authorization": f"Bearer key-of-{name}"} for name in ("ann", "ben"))


@dataclass
class Stream:
    """One stream, read in a thread of its own.

    `outcome` is `done` after `[DONE]`, `error` after an event of an error, else `broken`.
    """

    url: str
    body: dict[str, Any]
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    host: str = ""
    outcome: str = ""
    error: dict[str, Any] = field(default_factory=dict)
    steering: dict[str, Any] = field(default_factory=dict)
    ended: float = 0.0

    def start(self) -> Stream:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def wait_until_it_runs(self, timeout_s: float) -> None:
        within(timeout_s, lambda: len(self.arrivals) > 3, "a stream begins")

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"a stream did not end within {timeout_s} s"

    def _run(self) -> None:
        try:
            self._read()
        except httpx.TransportError:
            self.outcome = self.outcome or "broken"
        self.outcome = self.outcome or "broken"
        self.ended = time.monotonic()

    def _read(self) -> None:
        body = {**self.body, "stream": True}
        with httpx.stream(
            "POST", f"{self.url}/generate", json=body, headers=ANN, timeout=180
        ) as answer:
            assert answer.status_code == 200, answer.read()
            self.host = answer.headers["x-juice-replica"].partition("/")[0]
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if not data:
                    continue
                if data == "[DONE]":
                    self.outcome = self.outcome or "done"
                    continue
                event = json.loads(data)
                self.arrivals.append(time.monotonic())
                if "error" in event:
                    self.outcome, self.error = "error", event["error"]
                else:
                    self.text += event.get("text", "")
                    self.steering = event.get("steering", self.steering)


@dataclass
class OpenAIStream(Stream):
    """The same through OpenAI's client, which raises what it takes for an error."""

    def _read(self) -> None:
        with openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="key-of-ann", max_retries=0, timeout=180
        ) as client:
            more = {k: v for k, v in self.body.items() if k in ("steer", "ignore_eos")}
            made = client.completions.with_raw_response.create(
                model="mini",
                prompt=self.body["prompt"],
                max_tokens=self.body["max_tokens"],
                temperature=0,
                stream=True,
                extra_body=more,
            )
            self.host = made.headers["x-juice-replica"].partition("/")[0]
            reason = None
            try:
                for chunk in made.parse():
                    self.arrivals.append(time.monotonic())
                    for choice in chunk.choices:
                        self.text += choice.text
                        reason = choice.finish_reason or reason
                    self.steering = (chunk.model_extra or {}).get("steering") or self.steering
            except openai.APIError as error:
                self.outcome, self.error = "error", {"message": error.message}
            else:
                self.outcome = "done" if reason else "broken"


@dataclass
class Asked:
    """One short request of an `Asking`."""

    status: int
    text: str
    is_steered: bool
    duration_s: float
    host: str


class Asking:
    """A client that sends a short request, waits for the answer, and sends the next, for a block.

    Args:
        url: Where to.
        pause_s: Between requests.
    """

    def __init__(self, url: str, pause_s: float = 0.2) -> None:
        self.answers: list[Asked] = []
        self._url, self._pause_s = url, pause_s
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ends.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, headers=BEN, timeout=100) as client:
            while not self._ends.wait(self._pause_s):
                begun = time.monotonic()
                try:
                    answer = client.post("/generate", json=SHORT)
                except httpx.TransportError as error:
                    taken = time.monotonic() - begun
                    self.answers.append(Asked(0, repr(error), False, taken, ""))
                    continue
                body = answer.json()
                steering = body.get("steering", {})
                self.answers.append(
                    Asked(
                        answer.status_code,
                        body.get("text") or answer.text,
                        steering.get("applied") is True and steering["target"] == "parametric",
                        time.monotonic() - begun,
                        answer.headers.get("x-juice-replica", "").partition("/")[0],
                    )
                )

    def check(self) -> dict[str, Any]:
        """Assert that every request was answered as by one server, and return what was seen."""
        wrong = [
            answer for answer in self.answers if answer.status != 200 or answer.text != " Lima."
        ]
        assert not wrong, wrong[:3]
        assert self.answers
        assert all(answer.is_steered for answer in self.answers)
        return {
            "requests": len(self.answers),
            "answered_and_steered": len(self.answers),
            "longest_s": round(max(answer.duration_s for answer in self.answers), 2),
        }
