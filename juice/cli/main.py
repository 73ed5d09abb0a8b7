"""The entry point: the commands, and how they end.

The answer goes to standard output, everything else to standard error. Exit codes: 0 for success, 1
for a failure, 2 for a user's mistake, 130 after Ctrl-C.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Annotated, ParamSpec

import typer

import juice
from juice import quiet_imports
from juice.cli import (
    chat,
    compare,
    console,
    convert,
    doctor,
    evaluate,
    examples,
    generate,
    hub,
    identify,
    inspect,
    serve,
    tune,
)
from juice.errors import JuiceError

P = ParamSpec("P")
INTERRUPTED = {
    "evaluate": "interrupted; finished work is kept in --out: run the same command again to resume",
    "identify": "interrupted; no head set was written, what is computed is kept beside --out: run "
    "the same command again to resume",
}


def ends_cleanly(run: Callable[P, None]) -> Callable[P, None]:
    """Turn a JuiceError or Ctrl-C in a command into one line and an exit code."""

    @wraps(run)
    def ending(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            run(*args, **kwargs)
        except JuiceError as error:
            console.error(str(error))
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as interrupt:
            command = run.__module__.rpartition(".")[2]
            console.error(INTERRUPTED.get(command, "interrupted; nothing was written"))
            raise typer.Exit(130) from interrupt

    return ending


app = typer.Typer(
    name="juice",
    help="Steer a language model toward its context or its memory, at inference time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "identify": identify.run,
    "tune": tune.run,
    "select": tune.select,
    "evaluate": evaluate.run,
    "generate": generate.run,
    "chat": chat.run,
    "compare": compare.run,
    "inspect": inspect.run,
    "doctor": doctor.run,
    "pull": hub.pull,
    "push": hub.push,
    "convert": convert.run,
    "examples": examples.run,
    "split": examples.split,
    "serve": serve.run,
}
for name, command in COMMANDS.items():
    app.command(
        name,
        no_args_is_help=name not in ("chat", "identify", "doctor", "serve"),
        # Without the server installed, its flags are unknown.
        context_settings=(
            {"ignore_unknown_options": True, "allow_extra_args": True}
            if name == "serve" and not serve.FLAGS
            else None
        ),
    )(ends_cleanly(command))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(juice.__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    """Run the command line; a user's mistake never ends in a traceback."""
    warnings.showwarning = console.show_warning
    with quiet_imports():
        app()


if __name__ == "__main__":
    main()
