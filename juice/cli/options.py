"""Options that several commands share, each defined once, and how they are parsed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

from juice import uncollected
from juice.cli import console
from juice.engine.load_options import EngineOptions, LoadOptions
from juice.engine.sampling_options import Options
from juice.errors import UsageError

if TYPE_CHECKING:
    from juice.data.example import ConflictExample
    from juice.head_set.head_set import HeadSet
    from juice.steered_model import SteeredModel

SOURCES = (
    "Examples: a file, a folder, `mini`, `paraconflict`, `nq-swap`, `faitheval` or "
    "`hub:owner/name`."
)
ROWS = "A file (JSON lines, JSON or CSV), a folder or `hub:owner/name`."
Model = Annotated[
    str,
    typer.Option(help="A hub id, a local folder, a .gguf file, or `mini` (bundled, no network)."),
]
HeadSets = Annotated[
    Path | None,
    typer.Option(help="Folder of head sets; else JUICE_HEAD_SETS, ./head_sets, the shipped ones."),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="Make every prompt a user message in a chat: "
        "`default` for the tokenizer's own template, or a Jinja file; `none` for plain prompts."
    ),
]
NAMED_VALUES = dict[str, Any]
BY_NAME = inspect.Parameter.KEYWORD_ONLY
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
OutFile = Annotated[Path, typer.Option(help="The JSON lines file to write.")]
Columns = Annotated[
    str | None,
    typer.Option(help="What your columns are called, such as question=q,context=passage."),
]
HeadSetArgument = Annotated[
    str,
    typer.Argument(
        help="A head set: its folder, its scores file, or its name in the folder of head sets."
    ),
]
Html = Annotated[
    Path | None, typer.Option(help="Write a page about the head sets to this HTML file.")
]
OutFolder = Annotated[
    Path, typer.Option(help="Folder of head sets; the set is saved to `OUT/<model>/<name>`.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]


def spelled_out(run: Callable[..., None]) -> Callable[..., None]:
    """Give a command one flag per field of its `Options` parameters (`loading: LoadOptions`)."""
    signature = inspect.signature(run, eval_str=True)
    flags: dict[str, list[inspect.Parameter]] = {}
    others = []
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, Options):
            flags[parameter.name] = flags_of(kind)
        else:
            others.append(parameter.replace(kind=BY_NAME))
    last = [others.pop()] if others[-1].name == "json" else []
    shown = [*others, *chain.from_iterable(flags.values()), *last]

    @wraps(run)
    def command(**given: Any) -> None:
        for group, of_group in flags.items():
            kind = signature.parameters[group].annotation
            values = {f.name: parsed(kind, f.name, given.pop(f.name)) for f in of_group}
            given[group] = kind.of(**values)
        run(**given)

    command.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in shown}
    return command


def flags_of(kind: type[BaseModel], *, optional: bool = False) -> list[inspect.Parameter]:
    """Return the flags for the fields of a class; with `optional`, None where they are not given.

    A field that is not a number, a path or a choice is read as text. Named values (`vllm_args`)
    have a flag for one, `--vllm-arg name=value`; a field without a description, or another mapping,
    has none.
    """
    inherited_last = sorted(kind.model_fields, key=lambda name: name not in kind.__annotations__)
    flags = []
    for name in inherited_last:
        field = kind.model_fields[name]
        is_named = field.annotation == NAMED_VALUES
        if field.description is None or (get_origin(field.annotation) is dict and not is_named):
            continue
        help_text, default, flag_type = field.description, field.default, _type_of(field.annotation)
        if optional:
            by_default, default = field.get_default(call_default_factory=True), None
            if by_default not in (None, False, (), {}):
                help_text = f"{help_text.removesuffix('.')} ({by_default} by default)."
        if is_named:
            default, flag_type = None, list[str]
        if isinstance(default, tuple):
            default = ",".join(format(v, "g" if isinstance(v, float) else "") for v in default)
        # A flag that is off by default needs no --no- form.
        flag = _flag(name, is_named=is_named)
        spelled = f"{flag}/--no-{flag[2:]}" if default is True else flag
        option = typer.Option(spelled, help=help_text)
        shown: Any = flag_type | None if default is None else flag_type
        annotation = Annotated[shown, option]
        flags.append(inspect.Parameter(name, BY_NAME, default=default, annotation=annotation))
    return flags


def _flag(name: str, *, is_named: bool = False) -> str:
    return f"--{(name.removesuffix('s') if is_named else name).replace('_', '-')}"


def parsed(kind: type[BaseModel], name: str, given: Any) -> Any:
    """Return the value that a flag gives to its field: of name=value, repeated, a mapping.

    A value is JSON where it can be, else text. Raises a UsageError that names the flag.
    """
    annotation = kind.model_fields[name].annotation
    if annotation == tuple[float, ...]:
        return numbers(_flag(name), given)
    if annotation != NAMED_VALUES:
        return given
    values: dict[str, Any] = {}
    for one in given or ():
        key, equals, value = one.partition("=")
        if not (key.strip() and equals):
            raise UsageError(f"{_flag(name, is_named=True)} is {one!r}; expected name=value")
        with suppress(ValueError):
            value = json.loads(value)
        values[key.strip().replace("-", "_")] = value
    return values


def _type_of(annotation: Any) -> Any:
    if get_origin(annotation) is Literal:
        return annotation
    is_union = get_origin(annotation) in (Union, UnionType)
    types = get_args(annotation) if is_union else (annotation,)
    kinds = (str, bool, int, float, Path, list[str], list[Path])
    return next((kind for kind in kinds if kind in types), str)


def load(
    model: str,
    loading: LoadOptions,
    head_sets: Path | None = None,
    engine: EngineOptions | None = None,
) -> SteeredModel:
    """Load the model that the common options name."""
    with uncollected():
        from juice.loading import load as load_steered

    quiet_libraries()
    others = engine.model_dump() if engine else {}
    return load_steered(model, head_sets=head_sets, **loading.model_dump(), **others)


def head_set_for(model: SteeredModel, given: str | None) -> HeadSet | str | None:
    """Return the set that `--head-set` names: the model's, else that of a folder or scores file.

    A name wins over a file or folder that happens to be called the same.
    """
    if given is None or given in model.head_sets.by_name or not Path(given).exists():
        return given
    from juice.head_set.library import find_head_set

    _, found = find_head_set(given, model.head_sets.folder)
    model.check_fits(found)
    return found


def in_chat(
    model: SteeredModel, chat_template: str | None, examples: Sequence[ConflictExample] = ()
) -> SteeredModel:
    """Return the model with the template of --chat-template; without the option, the examples'."""
    from juice.identification.examples import in_form_of_examples

    if chat_template not in (None, "none"):
        model = model.with_chat_template(
            chat_template if chat_template == "default" else Path(chat_template)
        )
    formed = in_form_of_examples(model, examples, is_chosen=chat_template is not None)
    if formed is not model:
        console.note("juice: prompts go through the chat template, as when the examples were made")
    return formed


def quiet_libraries() -> None:
    """Silence the progress bars and advice of libraries: JuICE reports what a user must know."""
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging

    disable_progress_bars()
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Parse a comma-separated list of numbers; raises a UsageError that names the option."""
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise UsageError(f"{option} is {text!r}; expected numbers separated by commas") from error


def pairs(option: str, text: str | None) -> dict[str, str]:
    """Parse a comma-separated list of name=value; raises a UsageError that names the option."""
    parts = [part.partition("=") for part in (text or "").split(",") if part.strip()]
    if not all(name.strip() and value.strip() for name, _, value in parts):
        raise UsageError(f"{option} is {text!r}; expected name=value, separated by commas")
    return {name.strip(): value.strip() for name, _, value in parts}
