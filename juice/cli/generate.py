"""`juice generate`: continue a prompt, steered or not, or all three ways side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from juice.cli import comparison, console, options
from juice.errors import HeadSetNotFoundError, UsageError
from juice.methods import TARGETS, GateMode, Positions, SteerMethod, SteerTarget, scales_heads
from juice.options import EngineOptions, LoadOptions, SamplingOptions

if TYPE_CHECKING:
    from juice.engine import Completion


@options.spelled_out
def run(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    loading: LoadOptions,
    sampling: SamplingOptions,
    running: EngineOptions,
    model: options.Model = "mini",
    context: Annotated[
        str | None,
        typer.Option(help="Text that goes before the prompt; cad and adacad need it separately."),
    ] = None,
    steer: Annotated[SteerTarget, typer.Option(help="What wins a conflict.")] = "none",
    strength: Annotated[float, typer.Option(help="Multiplies both betas; 1 is as tuned.")] = 1.0,
    head_set: Annotated[
        str | None,
        typer.Option(
            help="A head set: its name, folder or scores file; else the one named like the target."
        ),
    ] = None,
    method: Annotated[
        SteerMethod,
        typer.Option(
            help="juice (two runs), june (one run), or cad and adacad (context-aware decoding)."
        ),
    ] = "juice",
    beta_plus: Annotated[
        float | None, typer.Option(help="Replaces the tuned beta of the + heads.")
    ] = None,
    beta_minus: Annotated[
        float | None,
        typer.Option(help="Replaces the tuned beta of the - heads, as in --beta-minus=-2."),
    ] = None,
    gate: Annotated[
        GateMode,
        typer.Option(help="Steer always (off), or where the set's gate finds a reason to (auto)."),
    ] = "off",
    positions: Annotated[
        Positions,
        typer.Option(help="Steer all positions, or those after the --context (question)."),
    ] = "all",
    max_tokens: Annotated[int, typer.Option(help="At most this many new tokens.")] = 64,
    chat_template: options.ChatTemplate = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Answer unsteered, toward the context and toward memory."),
    ] = False,
    head_sets: options.HeadSets = None,
    json: options.Json = False,
) -> None:
    """Continue a prompt; `--compare` shows what context and memory would each answer."""
    from juice.engine import Steer
    from juice.steered_model import join_context

    loaded = options.in_chat(options.load(model, loading, head_sets, running), chat_template)
    how: dict[str, Any] = {"context": context, "max_tokens": max_tokens, **sampling.model_dump()}
    if compare:
        if (
            steer != "none"
            or head_set is not None
            or beta_plus is not None
            or beta_minus is not None
            or gate != "off"
            or positions != "all"
            or not scales_heads(method)
        ):
            raise UsageError(
                "--compare shows no steering, context and parametric side by side; "
                "drop --steer, --head-set, the betas, --gate, --positions and --method cad or "
                "adacad"
            )
        served, named = loaded.head_sets.targets(method), loaded.head_sets.by_name
        if not served:
            raise HeadSetNotFoundError(
                f"nothing to compare: no head set in {loaded.head_sets.folder} fits {loaded.id} "
                f"and has betas for {method}; see `juice identify` and `juice tune`"
            )
        steers: list[SteerTarget | Steer] = [Steer(target="none")]
        for target in TARGETS:
            if target in served:
                steers.append(Steer(target=target, strength=strength, method=method))
            else:
                lack = (
                    f"the head set {target!r} has no betas for {method}"
                    if target in named
                    else f"no head set {target!r}"
                )
                console.note(f"juice: warning: {lack} in {loaded.head_sets.folder}; it is left out")
        on_terminal = console.is_terminal() and not json
        if on_terminal:
            how["top_logprobs"] = comparison.N_CANDIDATES
        completions = loaded.generate([prompt] * len(steers), steer=steers, **how)
        _note_warnings(completions)
        if on_terminal:
            origins = None
            if context is not None:
                whole = loaded.tokenize(join_context(context, prompt))
                alone = loaded.tokenize(prompt)
                origins = comparison.origins_in(loaded, completions, whole, alone)
            comparison.show(completions, origins, loaded.description.tokenizer)
        else:
            _show_all(completions, as_json=json)
        return
    one = Steer(
        target=steer,
        strength=strength,
        head_set=options.head_set_for(loaded, head_set),
        beta_plus=beta_plus,
        beta_minus=beta_minus,
        method=method,
        gate=gate,
        positions=positions,
    )
    completion = loaded.generate(prompt, steer=one, **how)[0]
    _note_warnings([completion])
    if json:
        console.answer_json(completion.to_dict())
    else:
        console.answer(completion.text)


def _note_warnings(completions: list[Completion]) -> None:
    for completion in completions:
        if gate := completion.steering.gate:
            sign, how = (">=", "steered") if gate.steers else ("<", "not steered")
            console.note(
                f"juice: {how}: {gate.signal} is {gate.value:.3g} {sign} {gate.threshold:.3g}"
            )
        for warning in completion.steering.warnings:
            console.note(f"juice: warning: {warning}")


def _show_all(completions: list[Completion], *, as_json: bool) -> None:
    if as_json:
        console.answer_json({c.steering.target: c.to_dict() for c in completions})
        return
    for completion in completions:
        console.answer(f"{completion.steering.target:11}{completion.text.strip()}")
