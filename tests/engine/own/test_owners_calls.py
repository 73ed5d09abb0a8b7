"""A model object has an owner, who may call it while the engine runs: those calls are not ours."""

from __future__ import annotations

from threading import Event, Thread

import pytest
import torch

import juice
from juice.engine.request import Request
from juice.identification.probes import CleanRun, Prober
from tests.support import tiny
from tests.support.mixed import mixed_requests, steering

IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])


def calls_that_differ(network: torch.nn.Module, expected: torch.Tensor, end: Event) -> list[int]:
    """Call the model until the end; return the number of calls, and of those that differ."""
    n_calls = n_wrong = 0
    while not end.is_set() or n_calls < 100:
        with torch.no_grad():
            n_wrong += not torch.equal(network(IDS).logits, expected)
        n_calls += 1
    return [n_calls, n_wrong]


@pytest.mark.parametrize("busy_with", ["requests", "probes"])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_a_model_that_its_owner_calls_meanwhile_answers_as_before(
    shape: str, busy_with: str
) -> None:
    """Kills: plans and passing hooks that belong to the process instead of to a thread."""
    network = tiny.tiny_model(shape)
    with torch.no_grad():
        expected = network(IDS).logits
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    end, counts = Event(), list[int]()
    owner = Thread(target=lambda: counts.extend(calls_that_differ(network, expected, end)))
    owner.start()
    try:
        if busy_with == "requests":
            requests = [r for r, _, _ in mixed_requests(seed=4, n=16)]
            long = Request.of(
                prompt_ids=(1, 2, 3),
                max_tokens=100,
                ignore_eos=True,
                steering=steering({(0, 1): 2.0, (3, 2): -2.0}),
            )
            for _ in range(3):
                model.engine.generate([*requests, long])
        else:
            loaded = model.loaded
            with torch.inference_mode():
                prober = Prober(loaded, CleanRun(loaded, [(1, 2, 3), (4, 5)]))
                for _ in range(60):
                    for layer in range(tiny.N_LAYERS):
                        prober.logits(layer, 1 + torch.eye(tiny.N_HEADS))
    finally:
        end.set()
        owner.join()
    n_calls, n_wrong = counts
    assert n_calls >= 100
    assert n_wrong == 0
