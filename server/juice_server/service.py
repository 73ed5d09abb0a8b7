"""The service between HTTP and the engine: one model, loaded at start, one request at a time."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable

from juice.engine import Completion
from juice.steered_model import SteeredModel
from juice_server.errors import NotReadyError
from juice_server.schemas import Choice, GenerateRequest, GenerateResponse, Steering, Timing, Usage


class Service:
    """Loads the model in the background and answers requests in the order in which they come."""

    def __init__(self, load: Callable[[], SteeredModel]) -> None:
        self._load = load
        self._model: SteeredModel | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Load the model and its head sets, off the event loop."""
        model = await asyncio.to_thread(self._load)
        await asyncio.to_thread(lambda: model.head_sets)
        self._model = model

    @property
    def is_ready(self) -> bool:
        """Tell whether requests can be answered."""
        return self._model is not None

    async def generate(self, body: GenerateRequest) -> GenerateResponse:
        """Generate for every prompt of a request, in one batch."""
        model = self._model
        if model is None:
            raise NotReadyError("the model is still loading; ask /readyz")
        arrived = time.monotonic()
        async with self._turn:
            completions = await asyncio.to_thread(
                lambda: model.generate(
                    body.prompt, steer=body.steer.to_steer(), max_tokens=body.max_tokens, temperature=body.temperature,
                    top_p=body.top_p, top_k=body.top_k, seed=body.seed, stop=tuple(body.stop), ignore_eos=body.ignore_eos,
                )
            )  # fmt: skip
        return _response(model.id, completions, time.monotonic() - arrived)


def _response(model_id: str, completions: list[Completion], total_s: float) -> GenerateResponse:
    first = completions[0]
    n_prompt = sum(c.n_prompt_tokens for c in completions)
    n_new = sum(len(c.token_ids) for c in completions)
    choices = [Choice(index=i, text=c.text, finish_reason=c.finish_reason) for i, c in enumerate(completions)]
    return GenerateResponse(
        id=f"gen-{uuid.uuid4().hex}",
        model=model_id,
        text=first.text,
        finish_reason=first.finish_reason,
        steering=Steering(**first.steering.to_dict()),
        usage=Usage(prompt_tokens=n_prompt, completion_tokens=n_new, total_tokens=n_prompt + n_new),
        timing=Timing(total_s=round(total_s, 4)),
        choices=choices if len(choices) > 1 else None,
    )
