"""What is loaded, its limits and its head sets, for the document: routes show them as they are."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from juice.head_set.gates import Signal
from juice.methods import GateMode, SteerMethod, SteerTarget, Target
from juice_server.schemas.documented import Documented


class Status(Documented):
    """The state of the server."""

    status: str
    """`ok` or `ready`; else why not: `loading`, `draining`, `engine failed` or `engine stuck`."""


class Version(Documented):
    """The version of the server."""

    version: str
    """It."""


class ModelEntry(Documented):
    """A name that the model is served under."""

    id: str
    """The name; `NAME:context` and `NAME:parametric` steer."""
    object: Literal["model"]
    """The kind of answer."""
    created: int
    """Always 0."""
    owned_by: Literal["juice"]
    """Always the same."""


class ModelList(Documented):
    """The names that the model is served under."""

    object: Literal["list"]
    """The kind of answer."""
    data: list[ModelEntry]
    """The names."""


class TunedBetas(Documented):
    """The scales of what the heads put out; a list has one for each head."""

    plus: float | list[float]
    """Those of the + heads, 0 or more."""
    minus: float | list[float]
    """Those of the - heads, 0 or less."""


class BetasByMethod(Documented):
    """The betas of each method; null where none were tuned."""

    juice: TunedBetas | None
    """Those of the dual run."""
    june: TunedBetas | None
    """Those of the single run."""


class Rule(Documented):
    """A signal and its threshold, with what they did on validation examples."""

    signal: Signal
    """The number that decides; `memory` needs the context apart from the prompt."""
    threshold: float
    """The least number at which a request is steered."""
    n_prompts: int
    """How many prompts with a conflict were measured."""
    kept: float
    """The share of these that stay steered."""
    side_effects: dict[str, tuple[float, float]]
    """The shares of right answers to prompts that steering should leave alone, by the kind of
    prompt: without steering, and with the gate.
    """


class MeasuredGate(Documented):
    """The rules for the betas of one method at strength 1."""

    chat_template_sha256: str | None
    """The hash of the chat template of the prompts; null for plain ones."""
    rules: list[Rule]
    """The first that can be used decides."""


class GatesByMethod(Documented):
    """The gates of each method; null where none was measured, or none was good enough."""

    juice: MeasuredGate | None
    """That of the dual run."""
    june: MeasuredGate | None
    """That of the single run."""


class ShownHeadSet(Documented):
    """A head set that fits the model."""

    name: str
    """Its name."""
    target: Target
    """What it steers toward."""
    sha256: str
    """The hash over the whole of it, which is its ETag."""
    n_heads: int
    """How many heads it has; one of both signs counts once."""
    beta: BetasByMethod | None
    """Its betas; null for a set that serves only requests with their own."""
    gates: GatesByMethod | None
    """Its gates; null where it has none."""
    chat_template_sha256: str | None
    """The hash of the chat template that it was found through; null for plain prompts."""
    window: tuple[int, int] | None
    """The first and the last layer with a companion; null where there is none."""
    extra_rows: float | None
    """The share of layers with a companion; null for a set without betas."""


class HeadsBySign(Documented):
    """The heads of a set, each its layer and its number there."""

    plus: list[tuple[int, int]]
    """The + heads, best first."""
    minus: list[tuple[int, int]]
    """The - heads, best first."""


class HeadScores(Documented):
    """The scores by which heads were chosen: by conflict type, layer and head."""

    kind: str
    """How they were found."""
    meaning: str
    """What a score says."""
    conflict_types: list[str]
    """The conflict types, in order."""
    plus: list[list[list[float]]]
    """Those for + heads."""
    minus: list[list[list[float]]]
    """Those for - heads."""


class WholeHeadSet(ShownHeadSet):
    """A head set with its heads."""

    heads: HeadsBySign
    """Its heads."""
    scores: HeadScores | None
    """The scores by which they were chosen; null where they are not kept."""


class UnfitHeadSet(Documented):
    """A head set of the folder that is not served."""

    path: str
    """Where it lies."""
    reason: str
    """Why it does not fit the model."""


class HeadSetList(Documented):
    """The head sets of the folder."""

    object: Literal["list"]
    """The kind of answer."""
    data: list[ShownHeadSet]
    """Those that fit the model."""
    unfit: list[UnfitHeadSet]
    """The others."""
    problem: str | None
    """Why what the folder holds now is not served; null where it is."""


class EngineInfo(Documented):
    """The engine, with more facts about it that each engine has its own of."""

    model_config = ConfigDict(extra="allow")

    name: str
    """`own` or `vllm`."""


class ModelInfo(Documented):
    """The model that is loaded."""

    name: str
    """What clients call it."""
    architecture: str
    """Its class in transformers."""
    n_layers: int
    """How many layers it has."""
    n_heads: int
    """How many query heads each layer has."""
    fingerprint: str | None
    """The hash by which head sets know it; null where it cannot be read."""
    dtype: str
    """The type of its weights."""
    quantization: str | None
    """How they are quantised; null where they are not."""
    device: str
    """Where it runs."""
    tp: int
    """How many devices share each layer."""
    has_chat_template: bool
    """Whether chats are served."""
    chat_template_sha256: str | None
    """The hash of the chat template; null without one."""


class LimitsInfo(Documented):
    """The bounds of requests; null where there is none of the server's own."""

    max_model_len: int | None
    """Tokens of prompt and answer."""
    max_batch: int
    """Generations of one client that run at the same time."""
    max_queue: int
    """Generations of one client that may wait."""
    kv_memory_bytes: int | None
    """Memory for keys and values."""
    max_prefill_tokens: int
    """Cost of a step, in tokens of a short prompt."""
    kv_bytes_per_token: int
    """What the keys and values of one token take."""
    max_tokens: int | None
    """New tokens of an answer."""
    max_prompt_tokens: int | None
    """Tokens of a prompt."""
    max_prompt_characters: int
    """Characters of a prompt."""
    max_prompts: int
    """Prompts of a request."""
    max_n: int
    """Choices of a prompt."""
    max_body_bytes: int
    """Size of a request's body."""
    request_timeout_s: float
    """Seconds for a request."""


class SteeringInfo(Documented):
    """How requests can be steered."""

    exact: bool
    """Whether steering is exact; false where the model's activations are quantised."""
    default: SteerTarget
    """How requests without `steer` are steered."""
    default_gate: GateMode
    """The gate of requests that name none."""
    targets: list[SteerTarget]
    """What a request may steer toward."""
    methods: list[SteerMethod]
    """The methods that the engine has."""
    head_sets: list[ShownHeadSet]
    """The head sets that fit the model."""


class Info(Documented):
    """What is loaded, its limits and how it can be steered."""

    version: str
    """The version of the server."""
    system_fingerprint: str
    """A name for all that decides a request's bits alone: model, dtype, engine, versions, flags."""
    engine: EngineInfo
    """What runs the model."""
    model: ModelInfo
    """The model."""
    limits: LimitsInfo
    """The bounds of requests."""
    steering: SteeringInfo
    """What there is to steer with."""
