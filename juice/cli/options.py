"""Options that several commands share, each defined once, and the values they are parsed to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from juice.errors import UsageError

if TYPE_CHECKING:
    from juice.steered_model import SteeredModel

SOURCES = "Examples: a file, a folder, `mini`, `paraconflict`, `nq-swap` or `hub:owner/name`."
ROWS = "A file (JSON lines, JSON or CSV), a folder or `hub:owner/name`."
Model = Annotated[str, typer.Option(help="A hub id, a local folder, or `mini` (bundled, no network).")]
HeadSets = Annotated[Path | None, typer.Option(help="Folder of head sets; else JUICE_HEAD_SETS, ./head_sets, the shipped ones.")]
ChatTemplate = Annotated[
    str | None,
    typer.Option(help="Make every prompt a user's message in a chat: `default` for the tokenizer's own template, or a Jinja file."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
OutFile = Annotated[Path, typer.Option(help="The JSON lines file to write.")]
Columns = Annotated[str | None, typer.Option(help="What your columns are called, such as question=q,context=passage.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a model is loaded: flags of every command that loads one."""

    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto"
    device_map: Annotated[
        str | None, typer.Option(help="Over several devices, memory and disk: auto, balanced, sequential, or JSON {module: device}.")
    ] = None
    offload_folder: Annotated[Path | None, typer.Option(help="Where the weights lie that a device map puts on disk.")] = None
    dtype: Annotated[str, typer.Option(help="auto (as stored on a GPU, float32 on a CPU), float32, bfloat16 or float16.")] = "auto"
    quantization: Annotated[str | None, typer.Option(help="bnb-4bit, torchao-int8; bnb-8bit with --allow-approximate.")] = None
    allow_approximate: Annotated[bool, typer.Option("--allow-approximate", help="Steer a model with quantised activations too.")] = False
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None
    attn_implementation: Annotated[str | None, typer.Option(help="eager, sdpa or another of transformers'.")] = None


def given(loading: Loading, *names: str) -> list[str]:
    """Return the flags among these that are not at their defaults."""
    defaults = Loading()
    return [f"--{name.replace('_', '-')}" for name in names if getattr(loading, name) != getattr(defaults, name)]


def loads_a_model(run: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of `Loading`, in the place of its parameter `loading`."""
    hints = get_type_hints(Loading, include_extras=True)
    by_name = inspect.Parameter.KEYWORD_ONLY
    flags = [inspect.Parameter(f.name, by_name, default=f.default, annotation=hints[f.name]) for f in fields(Loading)]
    own = inspect.signature(run, eval_str=True)
    others = [p.replace(kind=by_name) for p in own.parameters.values() if p.name != "loading"]
    last = [others.pop()] if others[-1].name == "json" else []
    shown = [*others, *flags, *last]

    @wraps(run)
    def command(**given: Any) -> None:
        loading = Loading(**{f.name: given.pop(f.name) for f in fields(Loading)})
        run(**given, loading=loading)

    command.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in shown}
    return command


def load(model: str, loading: Loading, head_sets: Path | None = None) -> SteeredModel:
    """Load the model that the common options name."""
    from juice.loading import load as load_steered

    quiet_libraries()
    return load_steered(model, head_sets=head_sets, **asdict(loading))


def in_chat(model: SteeredModel, chat_template: str | None) -> SteeredModel:
    """Return the model as the option --chat-template says: it takes prompts as they are, or through a template."""
    if chat_template is None:
        return model
    return model.with_chat_template(chat_template if chat_template == "default" else Path(chat_template))


def quiet_libraries() -> None:
    """Silence the libraries' own progress bars and advice: what a user must know, JuICE says."""
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging

    disable_progress_bars()
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Parse a comma-separated list of numbers; raises UsageError that names the option."""
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise UsageError(f"{option} is {text!r}; expected numbers separated by commas") from error


def pairs(option: str, text: str | None) -> dict[str, str]:
    """Parse a comma-separated list of name=value; raises UsageError that names the option."""
    parts = [part.partition("=") for part in (text or "").split(",") if part.strip()]
    if not all(name.strip() and value.strip() for name, _, value in parts):
        raise UsageError(f"{option} is {text!r}; expected name=value, separated by commas")
    return {name.strip(): value.strip() for name, _, value in parts}
