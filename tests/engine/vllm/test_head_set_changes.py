"""Head sets that change under a running vLLM: within its window, and without what it cached.

Kills: keys and values of the old coefficients that are used again because the name is the same, a
set that the engine cannot steer by.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

import juice
from juice.head_set.head_set import HeadSet
from tests.support import tiny
from tests.support.on_vllm import wide
from tests.support.serving import Server, serving, within

# Several blocks of 32 tokens, so that there is something to share.
PROMPT = "The capital of France is Paris, and the capital of Peru is Lima. It is"
OPTIONS = {"max_tokens": 12, "ignore_eos": True}


@pytest.mark.long
def test_a_changed_set_steers_anew_and_one_outside_the_window_is_refused(tmp_path: Path) -> None:
    tiny.save(tmp_path / "model", wide("Llama").build())
    folder = tmp_path / "head_sets"
    with juice.load(tmp_path / "model", dtype="float32") as model:

        def made(layer: int, beta: float) -> HeadSet:
            heads = {"plus": [(0, 1)], "minus": [(layer, 3)]}
            return model.make_head_set(
                name="context", target="context", **heads, beta_plus=beta, beta_minus=-beta
            )

        old, new, outside = made(1, 1.0), made(1, 4.0), made(3, 1.0)
        steers = [juice.Steer(target="context", head_set=each) for each in (old, new)]
        right = model.generate([PROMPT] * 2, steer=steers, **OPTIONS)
    assert len(right[0].logprobs) == OPTIONS["max_tokens"]
    assert right[0].logprobs != pytest.approx(right[1].logprobs, abs=0.01)
    old.save(folder / "model" / "context")
    with serving(
        *("--model", str(tmp_path / "model"), "--engine", "vllm", "--max-batch", "2"),
        *("--max-model-len", "128", "--head-sets", str(folder)),
        *("--vllm-arg", "enforce_eager=true", "--vllm-arg", "block_size=32"),
        environment={
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # It is a setting of the server, and the plugin reads it, too.
            "JUICE_HEAD_SETS": str(folder),
        },
    ) as server:
        for head_set, expected in ((old, right[0]), (new, right[1]), (old, right[0])):
            head_set.save(folder / "model" / "context", overwrite=True)
            within(20, lambda: seal_of(server) == head_set.seal, "it is served")  # noqa: B023
            for _ in range(2):  # the second finds all of it in the cache
                assert logprobs(server) == pytest.approx(expected.logprobs, abs=1e-3)
        outside.save(folder / "model" / "context", overwrite=True)
        within(20, lambda: ask(server).status_code == 422, "it is refused")
        refused = ask(server).json()["error"]["message"]
        assert "start it with --window 0-3 or --window all" in refused
        old.save(folder / "model" / "context", overwrite=True)
        within(20, lambda: ask(server).status_code == 200, "it is back")


def seal_of(server: Server) -> str:
    """Return the hash of the set that a server serves."""
    listed = httpx.get(f"{server.url}/v1/head_sets", timeout=120).json()["data"]
    return "".join(shown["sha256"] for shown in listed)


def ask(server: Server) -> httpx.Response:
    body = {"prompt": PROMPT, "steer": "context", "logprobs": 0, **OPTIONS}
    return httpx.post(f"{server.url}/generate", json=body, timeout=120)


def logprobs(server: Server) -> list[float]:
    answer = ask(server)
    assert answer.status_code == 200, answer.text
    assert answer.json()["steering"]["applied"]
    return [token["logprob"] for token in answer.json()["logprobs"]]
