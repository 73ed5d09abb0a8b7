"""The fields that all generating routes share: how to steer, how to sample, when to stop.

The OpenAPI document shows the text below a field. Our own routes refuse unknown fields, OpenAI's
and Anthropic's only those that would change the answer: clients send many that do not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    model_validator,
)
from pydantic_core import PydanticCustomError

from juice.engine.request import MAX_STOPS, MAX_TOP_LOGPROBS
from juice.engine.sampling_options import MAX_BIASES, Bias, SamplingOptions
from juice.engine.steer import Steer
from juice.engine.structure import Structure
from juice.formula import Explain
from juice_server.keys import MAX_PRIORITY
from juice_server.trace import Trace


class Documented(BaseModel):
    """The base of everything that clients send or get; constants describe themselves."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Answer(Documented):
    """The base of what clients get: a field is always there, unless it is `ABSENT`."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)


def is_none(value: Any) -> bool:
    """Return whether a field has no value."""
    return value is None


# A field that is left out of an answer where it has no value.
ABSENT: Any = Field(default=None, exclude_if=is_none)
STEERING_HEADER = "x-juice-steering"
APPLIED = (
    "What was applied: a JSON object with some of the fields of `steering`, those that are alike "
    "for all prompts. A stream with a gate has no `applied` there."
)


def _text(description: str) -> dict[str, str]:
    return {"type": "string", "description": description}


EVENT = {
    "type": "object",
    "description": "One event of the stream.",
    "required": ["data"],
    "properties": {
        "event": _text("Its type, in protocols whose events have one."),
        "data": _text("A JSON object, or `[DONE]` where a stream ends so."),
    },
}


def streamed(description: str = "Successful Response") -> dict[int | str, dict[str, Any]]:
    """Return what FastAPI takes to document an answer that may be a stream."""
    header = {"description": APPLIED, "schema": {"type": "string"}}
    stream = {"text/event-stream": {"schema": EVENT}}
    return {
        200: {"description": description, "content": stream, "headers": {STEERING_HEADER: header}}
    }


@dataclass(frozen=True)
class Unsupported:
    """A field that is refused by name, unless its value is one that changes no answer."""

    remedy: str = "leave it out"
    harmless: tuple[Any, ...] = ()

    def asks_for_nothing(self, value: Any) -> bool:
        """Return whether a value changes no answer; null never does, alone or in an object."""
        if isinstance(value, dict):
            value = {name: inner for name, inner in value.items() if inner is not None}
        return value is None or any(
            value == other and isinstance(value, bool) == isinstance(other, bool)
            for other in self.harmless
        )


def _each(names: str, *harmless: Any) -> dict[str, tuple[Any, ...]]:
    """Return fields that share the values which ask for nothing."""
    return dict.fromkeys(names.split(), harmless)


CHATS = "use /v1/chat/completions"
TEMPLATE = "what the model's template takes goes into chat_template_kwargs"
# Fields of llama.cpp, Ollama, TGI, SGLang, Mistral, vLLM and our other routes, by the remedy.
REMEDIES: dict[str, dict[str, tuple[Any, ...]]] = {
    "leave it out": {
        **_each("audio prediction prompt_embeds web_search_options"),
        **_each("suffix negative_prompt", ""),
        **_each("include_stop_str_in_output use_beam_search", False),
        **_each("spaces_between_special_tokens", True),
        **_each("logits_processors", []),
        **_each("modalities", ["text"]),
        **_each("verbosity", "medium"),
        **_each("guidance_scale length_penalty typical_p", 1),
        **_each("top_a mirostat dry_multiplier xtc_probability", 0),
    },
    "use max_tokens": _each(
        "max_new_tokens max_completion_tokens max_output_tokens n_predict num_predict"
    ),
    "use min_tokens": _each("min_new_tokens", 0),
    "use n": _each("best_of", 1),
    "use temperature": _each("do_sample", True),
    "use seed": _each("random_seed"),
    "use stop": _each("stop_sequences", []),
    "use stop_token_ids": _each("eos_token_id"),
    "use repetition_penalty": _each("repeat_penalty", 1),
    "use logit_bias": _each("allowed_token_ids bad_words suppress_tokens", []),
    "send a shorter prompt": _each("truncate_prompt_tokens") | _each("truncation", "disabled"),
    "use response_format": _each("json_object", False),
    "use response_format or structured_outputs": _each(
        "grammar ebnf regex choice json_schema response_schema format structural_tag"
        " output_format output_config text",
        {},
    ),
    "a grammar in structured_outputs can say what white space there may be": _each(
        "guided_whitespace_pattern"
    ),
    TEMPLATE: {
        **_each("enable_thinking think thinking_budget thinking_token_budget"),
        **_each("reasoning", {}, {"effort": "none"}),
        **_each("thinking", {"type": "disabled"}),
    },
    f"there is no effort to choose; {TEMPLATE}": _each("reasoning_effort effort", "none"),
    "leave reasoning_content of the answer unread": _each("include_reasoning", True),
    "serve the model with it (--chat-template FILE)": _each("chat_template"),
    "serve the model with it": _each("lora_path lora_adapter adapter_id"),
    "a chat template writes them itself": _each("add_special_tokens", False),
    CHATS: {
        **_each("chat_template_kwargs", {}),
        **_each("add_generation_prompt", True),
        **_each("continue_final_message", False),
        **_each("tools", []),
        **_each("tool_choice", "none", "auto"),
    },
    "use context, or /v1/chat/completions": _each("documents", []),
    "use tools": _each("functions", []),
    "use tool_choice": _each("function_call", "none", "auto"),
    "parallel_tool_calls: false allows one call": _each("max_tool_calls"),
    "use a message with the role system": _each("system instructions", "", []),
    "this route has another field for the text": _each("input messages prompt", ""),
    "use /v1/completions": _each("echo", False),
    "use /v1/completions with echo and logprobs": _each("prompt_logprobs", 0),
    "use /v1/chat/completions or /v1/completions, or on /v1/responses include": _each(
        "logprobs top_logprobs", False, 0
    ),
    "use /tokenize": _each("return_token_ids return_tokens_as_token_ids", False),
}
# A route that has a field of such a name serves it. What is not listed is ignored: clients send
# much that changes no answer, such as `user`.
UNSUPPORTED = {
    name: Unsupported(remedy, harmless)
    for remedy, fields in REMEDIES.items()
    for name, harmless in fields.items()
}


MAX_CHOICES_OF_TEXT = 10_000


def _some_schema(schema: dict[str, Any] | bool | str) -> dict[str, Any] | bool | str:
    if schema is False:
        raise ValueError("nothing is valid under this schema; give one, or true for any JSON")
    return {} if schema is True else schema


# A schema as an object, or as the text of one; true is that of any JSON.
Schema = Annotated[dict[str, Any] | bool | str, AfterValidator(_some_schema)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES_OF_TEXT, fail_fast=True)]


class NamedSchema(Documented, extra="forbid"):
    """A schema and what OpenAI has beside it; answers follow it whether `strict` or not."""

    name: str | None = None
    """Its name, for nobody but the reader."""
    description: str | None = None
    """What it is for."""
    schema_: Schema = Field(default={"type": "object"}, alias="schema")
    """The JSON schema, as an object or as text."""
    strict: bool | None = None
    """Accepted; answers always follow the schema."""


class ResponseFormat(Documented, extra="forbid"):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    """Any text, any JSON object, or JSON that is valid under a schema."""
    json_schema: NamedSchema | None = None
    """The schema, for type `json_schema`."""

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema needs json_schema, and no other type has one")
        return self

    @property
    def structure(self) -> Structure | None:
        if self.json_schema is not None:
            return Structure.json_schema(self.json_schema.schema_)
        return Structure.json_object() if self.type == "json_object" else None


class StructuredOutputs(Documented, extra="forbid"):
    """vLLM's `structured_outputs`: one of these."""

    json_: Schema | None = Field(default=None, alias="json")
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """A regular expression, that of Rust, of the whole answer."""
    choice: Texts | None = None
    """Texts of which the answer is one."""
    grammar: str | None = None
    """A grammar in Lark's or GBNF's notation."""
    json_object: bool | None = None
    """Any JSON object."""


def _parsed(value: Any) -> Any:
    """Read the text of an object, as some clients send it."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


class TrustFields(Documented):
    """Whether the text that a client sends is trusted."""

    allow_control_tokens: StrictBool = False
    """Whether messages, documents and contexts may form control tokens, such as those that end a
    turn. A raw prompt always may.
    """


class StructureFields(Documented):
    """Every field that can give an answer its form; at most one of them may."""

    response_format: ResponseFormat | None = None
    """The form of the answer, as OpenAI has it."""
    structured_outputs: Annotated[StructuredOutputs | None, BeforeValidator(_parsed)] = None
    """The form of the answer, as vLLM has it."""
    guided_json: Schema | None = None
    """The same as `structured_outputs.json`."""
    guided_regex: str | None = None
    """The same as `structured_outputs.regex`."""
    guided_choice: Texts | None = None
    """The same as `structured_outputs.choice`."""
    guided_grammar: str | None = None
    """The same as `structured_outputs.grammar`."""

    @model_validator(mode="after")
    def _one_structure(self) -> StructureFields:
        given = self._given()
        if len(given) > 1:
            raise ValueError(f"{' and '.join(sorted(given))} each give the answer a form; keep one")
        return self

    @property
    def structure(self) -> Structure | None:
        """The form of the answer; None: any."""
        return next(iter(self._given().values()), None)

    @property
    def structure_field(self) -> str | None:
        """The field that gives it."""
        return next(iter(self._given()), None)

    def _given(self) -> dict[str, Structure]:
        """Return the forms that fields give, by the name of the field."""
        outputs, format_ = self.structured_outputs or StructuredOutputs(), self.response_format
        regex, grammar = partial(Structure, "regex"), partial(Structure, "grammar")
        values: dict[str, tuple[Callable[[Any], Structure], Any]] = {
            "structured_outputs.json": (Structure.json_schema, outputs.json_),
            "structured_outputs.regex": (regex, outputs.regex),
            "structured_outputs.choice": (Structure.choice, outputs.choice),
            "structured_outputs.grammar": (grammar, outputs.grammar),
            "guided_json": (Structure.json_schema, self.guided_json),
            "guided_regex": (regex, self.guided_regex),
            "guided_choice": (Structure.choice, self.guided_choice),
            "guided_grammar": (grammar, self.guided_grammar),
        }
        given = {name: make(value) for name, (make, value) in values.items() if value is not None}
        if outputs.json_object:
            given["structured_outputs.json_object"] = Structure.json_object()
        if format_ is not None and format_.structure is not None:
            given["response_format"] = format_.structure
        return given


TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
TokenKey = Annotated[int, Field(ge=0, lt=2**31)]  # a key of a JSON object is text
MAX_TOKENS = 10_000_000
MAX_KEYS, MAX_PROMPTS, MAX_CHOICES = 100, 1024, 1024
# Choice i of n uses seed + i.
SEED = Field(strict=True, default=None, ge=-(2**63), lt=2**63)


def _check_size(value: Any, n: int, what: str = "entries") -> Any:
    if isinstance(value, list | dict) and len(value) > n:
        counts = {"n": n, "what": what, "got": len(value)}
        raise PydanticCustomError("too_long", "expected at most {n} {what}, got {got}", counts)
    return value


def at_most(n: int) -> BeforeValidator:
    """Refuse a list or object of more than n entries before they are checked.

    Each wrong entry would otherwise add an error of its own.
    """
    return BeforeValidator(partial(_check_size, n=n))


class Body(Documented):
    """An object that a client sends; unknown fields are refused, and so are too many fields."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bound_keys(cls, body: Any) -> Any:
        return _check_size(body, MAX_KEYS, "fields") if isinstance(body, dict) else body


def target_alone(value: Any) -> Any:
    """Turn the name of a target into a `steer` of it."""
    return {"target": value} if isinstance(value, str) else value


def as_list(value: Any) -> Any:
    """Turn a single string into a list of one."""
    return [value] if isinstance(value, str) else value


SteerField = Annotated[Steer | None, BeforeValidator(target_alone), at_most(MAX_KEYS)]


class GenerationFields(TrustFields, StructureFields, SamplingOptions, Body):
    """How to steer, sample and stop; the ranges of sampling are those of `SamplingOptions`."""

    model_config = ConfigDict(frozen=False)

    default_max_tokens: ClassVar[int] = 64

    steer: SteerField = None
    """How to steer: a target (`none`, `context`, `parametric`), or an object with more."""
    explain: Explain | None = None
    """`effect` adds to `steering` what it and the context changed at the first new token."""
    max_tokens: int | None = Field(strict=True, default=None, ge=0, le=MAX_TOKENS)
    """The most new tokens."""
    min_tokens: int = Field(strict=True, default=0, ge=0, le=MAX_TOKENS)
    """The fewest new tokens before the answer may end."""
    logit_bias: Annotated[dict[TokenKey, Bias] | None, at_most(MAX_BIASES)] = None  # type: ignore[assignment]
    """Added to the logits of single tokens, by id, from -100 to 100."""
    seed: int | None = SEED
    """Seed of the sampling; the same request with the same seed gives the same tokens."""
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None,
        BeforeValidator(as_list),
        at_most(MAX_STOPS),
    ] = None
    """A string or several; the answer ends before the first that occurs."""
    stop_token_ids: Annotated[list[TokenId], at_most(MAX_STOPS)] = Field(default_factory=list)
    """Tokens that end the answer, besides the model's own."""
    ignore_eos: bool = False
    """Do not end at the model's own stop tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    n: int = Field(strict=True, default=1, ge=1, le=MAX_CHOICES)
    """Answers of each prompt."""
    priority: int | None = Field(strict=True, default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Lower numbers go first; at least what the key allows."""
    stream: bool = False
    """Send the answer as server-sent events while it is made."""

    def options(self) -> dict[str, Any]:
        """Return the fields that `SteeredModel.request` takes unchanged."""
        return {
            **{name: getattr(self, name) for name in SamplingOptions.model_fields},
            "logit_bias": self.logit_bias or {},
            "min_tokens": self.min_tokens,
            "explain": self.explain,
            "stop": tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "structure": self.structure,
            "skip_special_tokens": self.skip_special_tokens,
        }


def _refusal(name: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("not_served", "{message}", {"name": name, "message": message})


def _unwrapped(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with `steer` at the top level, which clients of vLLM send in `vllm_xargs`."""
    others = body.get("vllm_xargs")
    if others is None:
        return body
    if not isinstance(others, dict) or others.keys() - {"steer"} or body.get("steer") is not None:
        message = "expected vllm_xargs with nothing but steer, and no other steer"
        raise _refusal("vllm_xargs", message)
    asked = others.get("steer")
    if isinstance(asked, str) and asked.lstrip().startswith("{"):  # as they hold no objects
        try:
            asked = json.loads(asked)
        except (ValueError, RecursionError) as error:
            raise _refusal("vllm_xargs", f"vllm_xargs.steer is not JSON: {error}") from None
    rest = {name: value for name, value in body.items() if name != "vllm_xargs"}
    return {**rest, "steer": asked}


# The fields of `steer` itself, and what stands for it elsewhere.
NEARLY_STEER = frozenset(
    {"extra_body", "target", "head_set", "head_sets", "strength", "method", "gate"}
    | {"positions", "beta", "beta_plus", "beta_minus", "heads", "coefficients"}
)


def _is_nearly_steer(name: str) -> bool:
    folded = name.casefold()
    is_near = "steer" in folded or get_close_matches(folded, ["steer"], 1, 0.8)
    return name in NEARLY_STEER or bool(is_near)


class StreamOptions(Documented):
    """What a stream carries in addition to its text."""

    include_usage: bool = False
    """Whether the stream ends with the usage."""
    continuous_usage_stats: Literal[False] = False
    """The usage comes at the end alone, by `include_usage`."""


class OpenAIFields(GenerationFields):
    """OpenAI's fields and defaults.

    Unknown fields are tolerated; those that would change the answer are refused.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    # Beside those of `UNSUPPORTED`.
    not_served: ClassVar[Mapping[str, Unsupported]] = {}

    model: str | None = None
    """The name of the model; `NAME:context` and `NAME:parametric` steer."""
    temperature: float = Field(strict=True, default=1.0, ge=0, le=2)
    """0 takes the likeliest token."""
    stream_options: StreamOptions | None = None
    """What a stream carries besides."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_changes_meaning(cls, body: Any) -> Any:
        """Refuse a field that is not served, unless its value means unused; null means absent."""
        if not isinstance(body, dict) or len(body) > MAX_KEYS:
            return body  # too many names to check: `Body` refuses them
        for name, value in body.items():
            found = cls.not_served.get(name)
            if found is None and name not in cls.model_fields:
                found = UNSUPPORTED.get(name)
            if found is not None and not found.asks_for_nothing(value):
                raise _refusal(name, f"the field {name} is not served here; {found.remedy}")
            if name not in cls.model_fields and value is not None and _is_nearly_steer(name):
                # Tolerated as unknown, it would pass unsteered.
                message = f"the field {name} does not steer; use steer, at the top level"
                raise _refusal(name, message)
        return {name: value for name, value in _unwrapped(body).items() if value is not None}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class PromptDetails(Answer):
    """More about the prompts' tokens."""

    cached_tokens: int = 0
    """Those that vLLM's prefix cache had."""


class Usage(Answer):
    """Prompt and generated tokens; a prompt with several choices counts once."""

    prompt_tokens: int
    """Tokens of the prompts."""
    completion_tokens: int
    """Tokens of the answers, stop tokens included."""
    total_tokens: int
    """Both."""
    prompt_tokens_details: PromptDetails
    """More about the tokens of the prompts."""

    @classmethod
    def of(cls, trace: Trace) -> Usage:
        """Return the usage of one HTTP request."""
        n, n_new = trace.n_prompt_tokens, trace.n_generated_tokens
        return cls(
            prompt_tokens=n,
            completion_tokens=n_new,
            total_tokens=n + n_new,
            prompt_tokens_details=PromptDetails(cached_tokens=trace.n_cached_tokens),
        )


Contexts = Annotated[list[str] | None, BeforeValidator(as_list), at_most(MAX_PROMPTS)]
TOP_LOGPROBS = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
