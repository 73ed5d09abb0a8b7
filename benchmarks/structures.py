"""Answers of a given form: how many are valid, and what they cost a token.

`python -m benchmarks.structures [--engine vllm] [--only cost] [--write FILE]`.

Random schemas are answered by the bundled model, sampled at temperature 1, unsteered and steered,
and judged by `jsonschema`. The cost is the median of a step with the form of free text less that of
one without, of the same tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import juice
from benchmarks import machine
from juice.engine import GenerationRequest, Steering, Structure
from juice.engine.steering import unsteered
from juice.options import SamplingOptions
from tests.support.schemas import judge, random_schema

N_SCHEMAS, MAX_TOKENS, N_TOKENS, N_REPEATS = 1000, 300, 128, 15
PROMPT = "The name of the capital city of Peru is Cairo. The name of the capital city of Peru is"
# Text of any length, in which every token but the last is looked at by the rules.
FREE = Structure("regex", r"(.|\n)*")


def valid(model: juice.SteeredModel, steering: Steering) -> dict[str, int]:
    """Return how many answers were whole, and how many valid."""
    rng = Random(0)
    schemas = [random_schema(rng) for _ in range(N_SCHEMAS)]
    requests = [
        GenerationRequest(
            prompt_ids=model.tokenize(PROMPT),
            max_tokens=MAX_TOKENS,
            structure=Structure.json_schema(schema),
            sampling=SamplingOptions(temperature=1.0, seed=i),
            steering=steering,
        )
        for i, schema in enumerate(schemas)
    ]
    answers = model.engine.generate(requests)
    whole = [pair for pair in zip(schemas, answers, strict=True) if pair[1].finish_reason == "stop"]
    n_valid = sum(judge(schema).is_valid(json.loads(answer.text)) for schema, answer in whole)
    return {"asked": N_SCHEMAS, "whole": len(whole), "valid": n_valid}


def step_ms(model: juice.SteeredModel, n_requests: int, structure: Structure | None) -> float:
    """Return the milliseconds of one step of some requests, without their prompts."""
    # What ends an answer is ruled out with and without a form, so that all have as many tokens.
    stops = dict.fromkeys(model.description.stop_token_ids, -100.0)
    request = GenerationRequest(
        prompt_ids=model.tokenize(PROMPT),
        max_tokens=N_TOKENS,
        structure=structure,
        sampling=SamplingOptions(logit_bias=stops),
    )
    answers = model.engine.generate([request] * n_requests)
    seconds = []
    for answer in answers:
        assert len(answer.tokens) == N_TOKENS
        times = answer.timing.tokens_s
        seconds.append((times[-1] - times[0]) / (N_TOKENS - 1))
    return 1000 * statistics.median(seconds)


def cost(model: juice.SteeredModel, n_requests: int) -> dict[str, float]:
    """Return the milliseconds of a step with and without a form, which take turns."""
    ways = {"without": None, "with": FREE}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(N_REPEATS + 1):
        for name, structure in ways.items():
            ms = step_ms(model, n_requests, structure)
            if i:  # the first warms up
                times[name].append(ms)
    return {name: round(statistics.median(own), 2) for name, own in times.items()}


def main() -> None:
    """Measure and print, or add to a file of results, by engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["own", "vllm"], default="own")
    parser.add_argument("--only", choices=["validity", "cost"])
    parser.add_argument("--write", type=Path, help="the file to add to")
    asked = parser.parse_args()
    options: dict[str, Any] = {"window": "all", "vllm_args": {"enforce_eager": True}}
    result: dict[str, Any] = {
        "llguidance": version("llguidance"),
        "jsonschema": version("jsonschema"),
        "machine": machine.describe(),
    }
    with juice.load(
        "mini", engine=asked.engine, **(options if asked.engine == "vllm" else {})
    ) as model:
        if asked.engine == "vllm":
            result["vllm"] = model.engine.details["version"]
        if asked.only != "cost":
            steered = model.resolve(juice.Steer(target="context"))
            result["unsteered"] = valid(model, unsteered())
            result["steered"] = valid(model, steered)
        if asked.only != "validity":
            result["ms_a_step"] = {str(n): cost(model, n) for n in (1, 16)}
    print(json.dumps({asked.engine: result}))
    if asked.write is not None:
        before = json.loads(asked.write.read_text()) if asked.write.exists() else {}
        found = {**before, asked.engine: {**before.get(asked.engine, {}), **result}}
        asked.write.write_text(f"{json.dumps(found, indent=2)}\n")


if __name__ == "__main__":
    main()
