"""Options that several commands share, each defined once, and the values they are parsed to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from juice.errors import UsageError

if TYPE_CHECKING:
    from juice.steered_model import SteeredModel

SOURCES = "Examples: a file, a folder, `mini`, `paraconflict`, `nq-swap` or `hub:owner/name`."
ROWS = "A file (JSON lines, JSON or CSV), a folder or `hub:owner/name`."
Model = Annotated[str, typer.Option(help="A hub id, a local folder, or `mini` (bundled, no network).")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[str, typer.Option(help="auto (as stored on a GPU, float32 on a CPU), float32, bfloat16 or float16.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
Attention = Annotated[str | None, typer.Option("--attn-implementation", help="eager, sdpa or another of transformers'.")]
HeadSets = Annotated[Path | None, typer.Option(help="Folder of head sets; else JUICE_HEAD_SETS, ./head_sets, the shipped ones.")]
ChatTemplate = Annotated[
    str | None,
    typer.Option(help="Make every prompt a user's message in a chat: `default` for the tokenizer's own template, or a Jinja file."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
OutFile = Annotated[Path, typer.Option(help="The JSON lines file to write.")]
Columns = Annotated[str | None, typer.Option(help="What your columns are called, such as question=q,context=passage.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]


def load(model: str, device: str, dtype: str, revision: str | None, attention: str | None, head_sets: Path | None = None) -> SteeredModel:
    """Load the model that the common options name."""
    from juice.steered_model import load as load_steered

    quiet_libraries()
    return load_steered(model, head_sets=head_sets, device=device, dtype=dtype, revision=revision, attn_implementation=attention)


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
