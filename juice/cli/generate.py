"""`juice generate`: continue a prompt, steered or not, or all three ways side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from juice.cli import console, options
from juice.engine.load_options import EngineOptions, LoadOptions
from juice.engine.sampling_options import Options, SamplingOptions
from juice.errors import HeadSetNotFoundError, UsageError
from juice.formula import (
    TARGETS,
    Explain,
    GateMode,
    NamedPositions,
    SteerMethod,
    SteerTarget,
    scales_heads,
)

if TYPE_CHECKING:
    from juice.engine.answer import Completion
    from juice.engine.steer import EffectReport, Steer
    from juice.steered_model import SteeredModel


class SteerFlags(Options):
    """How to steer."""

    steer: SteerTarget = Field(default="none", description="What wins a conflict.")
    strength: float = Field(default=1.0, description="Multiplies both betas; 1 is as tuned.")
    head_set: str | None = Field(
        default=None,
        description="A head set: its name, folder or scores file; else the one named like the "
        "target.",
    )
    method: SteerMethod | None = Field(
        default=None,
        description="juice (two runs), june (one run), or a contrast (cad, adacad, cocoa, ckplug, "
        "grd); else the head set's.",
    )
    beta_plus: float | None = Field(
        default=None, description="Replaces the tuned beta of the + heads."
    )
    beta_minus: float | None = Field(
        default=None, description="Replaces the tuned beta of the - heads, as in --beta-minus=-2."
    )
    gate: GateMode = Field(
        default="off",
        description="Steer always (off), or where the set's gate finds a reason to (auto).",
    )
    positions: NamedPositions = Field(
        default="all",
        description="Steer all positions, those after the --context (question), the prompt's last "
        "token and the new ones (last), or these alone (generated).",
    )


class AnswerFlags(SamplingOptions):
    """What to continue beside the prompt, how far, and how to sample."""

    context: str | None = Field(
        default=None,
        description="Text that goes before the prompt; contrasts need it separately.",
    )
    max_tokens: int = Field(default=64, description="At most this many new tokens.")
    explain: Explain | None = Field(
        default=None,
        description="`effect` says what steering and the context changed at the first token.",
    )


@options.spelled_out
def run(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    steering: SteerFlags,
    answering: AnswerFlags,
    loading: LoadOptions,
    running: EngineOptions,
    model: options.Model = "mini",
    chat_template: options.ChatTemplate = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Answer unsteered, toward the context and toward memory."),
    ] = False,
    head_sets: options.HeadSets = None,
    json: options.Json = False,
) -> None:
    """Continue a prompt; `--compare` shows what context and memory would each answer."""
    from juice.engine.steer import Steer

    loaded = options.in_chat(options.load(model, loading, head_sets, running), chat_template)
    if compare:
        _compare(loaded, prompt, steering, answering, as_json=json)
        return
    given = steering.model_dump(exclude={"steer", "head_set"})
    head_set = options.head_set_for(loaded, steering.head_set)
    steer = Steer(target=steering.steer, head_set=head_set, **given)
    completion = loaded.generate(prompt, steer=steer, **answering.model_dump())[0]
    _note_warnings([completion])
    console.answer_either(completion.text, completion.to_dict(), as_json=json)


def _compare(
    model: SteeredModel, prompt: str, steering: SteerFlags, answering: AnswerFlags, *, as_json: bool
) -> None:
    steers = _compared(model, steering)
    fields: dict[str, Any] = answering.model_dump()
    completions = model.generate(
        [prompt] * len(steers), steer=steers, top_logprobs=console.N_CANDIDATES, **fields
    )
    _note_warnings(completions)
    if as_json:
        console.answer_json({one.steering.target: one.to_dict() for one in completions})
        return
    whole, alone = model.tokenize(prompt), None
    if answering.context is not None:
        whole, alone = model.prompts.encode(model.prompts.behind(answering.context, prompt)), whole
    console.show_three(model, completions, whole, alone)


def _compared(model: SteeredModel, steering: SteerFlags) -> list[SteerTarget | Steer]:
    """Return the ways to steer that are compared; notes a target that has no betas."""
    from juice.engine.steer import Steer

    method, compared = steering.method, {"strength", "method"}
    given = steering.model_dump(exclude=compared)
    if (method is not None and not scales_heads(method)) or (
        given != SteerFlags().model_dump(exclude=compared)
    ):
        raise UsageError(
            "--compare shows no steering, context and parametric side by side; "
            "drop --steer, --head-set, the betas, --gate, --positions and any "
            "--method but juice and june"
        )
    of_method = f" for {method}" if method else ""
    served, named = model.head_sets.targets(method), model.head_sets.by_name
    if not served:
        raise HeadSetNotFoundError(
            f"nothing to compare: no head set in {model.head_sets.folder} fits {model.id} "
            f"and has betas{of_method}; see `juice identify` and `juice tune`"
        )
    steers: list[SteerTarget | Steer] = ["none"]
    for target in TARGETS:
        if target in served:
            steers.append(Steer(target=target, strength=steering.strength, method=method))
            continue
        lack = f"no head set {target!r}"
        if target in named:
            lack = f"the head set {target!r} has no betas{of_method}"
        console.note(f"juice: warning: {lack} in {model.head_sets.folder}; it is left out")
    return steers


def _note_warnings(completions: list[Completion]) -> None:
    for completion in completions:
        if gate := completion.steering.gate:
            sign, how = (">=", "steered") if gate.steers else ("<", "not steered")
            console.note(
                f"juice: {how}: {gate.signal} is {gate.value:.3g} {sign} {gate.threshold:.3g}"
            )
        if effect := completion.steering.effect:
            console.note(f"juice: {_changed(effect)}")
        for warning in completion.steering.warnings:
            console.note(f"juice: warning: {warning}")


def _changed(effect: EffectReport) -> str:
    """Return what steering and the context changed at the first token."""
    runs = {"steered": effect.steered, "unsteered": effect.unsteered}
    if effect.without_context is not None:
        runs["without the context"] = effect.without_context
    firsts = [f"{name} {run.text!r} ({run.probability:.2f})" for name, run in runs.items()]
    by_context = effect.context_divergence
    others = "" if by_context is None else f", the context {by_context:.2f}"
    return (
        f"first token: {', '.join(firsts)}; steering changes {effect.divergence:.2f} nats{others}"
    )
