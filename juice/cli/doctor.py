"""`juice doctor`: is this model steered exactly, and what does steering cost?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from juice.cli import console, options
from juice.engine.load_options import EngineOptions, LoadOptions
from juice.errors import UsageError

if TYPE_CHECKING:
    from juice.checks.doctor import Diagnosis

DEEP = (
    "Also check prompts beyond sliding windows and RoPE switches, and z against TransformerLens "
    "(extra `lens`)."
)


@options.spelled_out
def run(
    loading: LoadOptions,
    running: EngineOptions,
    model: options.Model = "mini",
    deep: Annotated[bool, typer.Option("--deep", help=DEEP)] = False,
    head_sets: options.HeadSets = None,
    json: options.Json = False,
) -> None:
    """Check on the loaded model that steering is exact; exit 1 for a model that JuICE refuses.

    With --engine vllm, what vLLM serves is compared with transformers' own model, on the CPU.
    """
    from juice.checks.doctor import Diagnosis, diagnose, diagnose_served
    from juice.checks.heads import require_lens
    from juice.errors import UnsupportedModelError

    if deep:
        if running.engine != "own":
            raise UsageError("--deep is for juice's own engine; leave it out with vLLM")
        require_lens()
    try:
        loaded = options.load(model, loading, head_sets, running)
    except UnsupportedModelError as error:
        found = Diagnosis(model=model, exact=False, reason=str(error))
    else:
        if running.engine == "own":
            found = diagnose(loaded.engine, loaded.head_sets, deep=deep, progress=console.progress)
        else:
            beside = LoadOptions(
                device="cpu",
                dtype=loaded.description.dtype,
                revision=loading.revision,
                attn_implementation="eager",
            )
            reference = options.load(model, beside, head_sets).loaded
            found = diagnose_served(loaded.engine, reference, loaded.head_sets, console.progress)
        loaded.close()
    console.answer_either("\n".join(_lines(found)), found.to_dict(), as_json=json)
    if not found.exact:
        raise typer.Exit(1)


def _lines(found: Diagnosis) -> list[str]:
    facts = found.facts
    refusal = f"{'not steered exactly' if facts else 'refused'}: {found.reason}"
    lines = [f"{found.model}: {'steered exactly' if found.exact else refusal}", ""]
    if facts:
        rows = _served(facts) if "engine" in facts else _facts(facts)
        lines += [*(f"{name:16}{value}" for name, value in rows), ""]
    for check in found.checks:
        outcome = "ok" if check.passed else "FAILED" if check.decisive else "differs"
        measured = f"{check.difference:.1g} {check.unit} (bound {check.bound:g})"
        lines.append(f"{outcome:8}{check.name}: {measured}")
    if facts:
        lines += ["", *_head_sets(found)]
    return [line.rstrip() for line in lines]


def _facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    shared = f"{facts['n_heads'] // facts['n_kv_heads']} a KV head"
    if facts["latent_cache"]:
        shared = "one latent for all"
    window, switch = facts["sliding_window"], facts["rope_switch"]
    attention = f"sliding window of {window}" if window else "full"
    if switch:
        attention += f"; other positions beyond {switch} tokens, where a row is prefilled again"
    no_print = "none: its weights are not in float32 in memory, nor in safetensors files"
    widths = ", ".join(map(str, facts["d_head"]))
    why = f"; {facts['dtype_reason']}" if facts["dtype_reason"] else ""
    batches = "rows of any lengths"
    if facts["own_masks"]:
        batches = "rows of one length only: the model makes its own masks"
    clean_run = "between the steered layers alone"
    if facts["full_rows"]:
        clean_run = "a full row: the layers must all see the same rows"
    return [
        ("model", f"{facts['architecture']}, {facts['dtype']} on {facts['device']}{why}"),
        ("fingerprint", facts["fingerprint"] or no_print),
        ("layers", str(facts["n_layers"])),
        ("heads", f"{facts['n_heads']} a layer, d_head {widths}, {shared}"),
        *_sizes(facts),
        ("attention", attention),
        ("batches", batches),
        ("clean run", clean_run),
    ]


def _served(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a model that another engine runs."""
    window, steered = (
        f"layers {given[0]}-{given[1]}" if given else "no layer"
        for given in (facts["window"], facts["steered_layers"])
    )
    return [
        ("model", f"{facts['architecture']}, {facts['dtype']}"),
        ("fingerprint", facts["fingerprint"] or "none"),
        ("layers", str(facts["n_layers"])),
        *_sizes(facts, ", companions' included"),
        ("engine", f"{facts['engine']} {facts['version']}, {facts['runner']} runner"),
        ("attention", ", ".join(facts["attention"])),
        ("steered", f"{steered}, in two runs {window}"),
    ]


def _sizes(facts: dict[str, Any], included: str = "") -> list[tuple[str, str]]:
    return [
        ("KV cache", f"{facts['kv_bytes_per_token']:,} bytes a token{included}"),
        ("context", f"{facts['context']:,} tokens" if facts["context"] else "no end of its own"),
    ]


def _head_sets(found: Diagnosis) -> list[str]:
    lines = []
    for fit in found.head_sets:
        cost = "no second row"
        if fit.window:
            first, last = fit.window
            cost = f"layers {first}-{last}, {fit.extra_rows:.0%} of a second row"
        lines.append(
            f"{'head set':16}{fit.name} (toward {fit.target}, {fit.n_heads} heads): {cost}"
        )
    lines += [f"{'unfit':16}{path}: {reason}" for path, reason in found.unfit_head_sets.items()]
    if not lines:
        lines = [
            f"{'head sets':16}none fits this model; "
            f"make one with `juice identify --model {found.model}`"
        ]
    if found.n_foreign_head_sets:
        lines.append(f"{'':16}{found.n_foreign_head_sets} for other models")
    return lines
