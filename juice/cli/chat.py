"""`juice chat`: talk to a model in the terminal, and turn the steering as you go."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from juice.cli import console, options
from juice.engine.load_options import EngineOptions, LoadOptions
from juice.engine.sampling_options import SamplingOptions
from juice.errors import JuiceError, RequestError, UsageError
from juice.formula import STEER_TARGETS, SteerTarget

if TYPE_CHECKING:
    from juice.steered_model import SteeredModel

COMMANDS = {
    "/steer": "context, parametric or none: what wins from now on",
    "/dial": "a number: the strength; 1 is as tuned",
    "/context": "a text that goes before what you say next; nothing to leave it out",
    "/compare": "the last answer all three ways",
    "/forget": "begin anew",
    "/help": "this list",
    "/quit": "leave",
}


@options.spelled_out
def run(
    loading: LoadOptions,
    sampling: SamplingOptions,
    running: EngineOptions,
    model: options.Model = "mini",
    steer: Annotated[SteerTarget, typer.Option(help="What wins a conflict.")] = "none",
    strength: Annotated[float, typer.Option(help="Multiplies both betas; 1 is as tuned.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="At most this many new tokens.")] = 256,
    head_sets: options.HeadSets = None,
) -> None:
    """Talk to a chat model; /steer, /dial and /compare turn and show the steering."""
    loaded = options.load(model, loading, head_sets, running)
    if loaded.own_chat_template is None:
        raise UsageError(f"{model} has no chat template; use juice generate")
    given = {**sampling.model_dump(), "max_tokens": max_tokens}
    chat = _Chat(loaded.with_chat_template("default"), given)
    chat.turn(steer)
    chat.dial(str(strength))
    console.note(f"juice: {loaded.id}; /help lists the commands")
    with suppress(ImportError):  # where there is one, arrow keys edit and bring back lines
        importlib.import_module("readline")
    for line in _lines(chat):
        if line == "/quit":
            break
        try:
            chat.take(line)
        except JuiceError as error:
            console.error(str(error))
        except KeyboardInterrupt:
            console.note("\njuice: stopped")


def _lines(chat: _Chat) -> Iterator[str]:
    """Yield the lines that are typed, or those of standard input, until its end or Ctrl-C."""
    is_asked = sys.stdin.isatty()
    while True:
        try:
            line = input(chat.prompt if is_asked else "").strip()
        except (EOFError, KeyboardInterrupt):
            if is_asked:
                console.note("")
            return
        if line:
            yield line


class _Chat:
    """The turns so far, and how the next answer is steered."""

    def __init__(self, model: SteeredModel, options: dict[str, Any]) -> None:
        self._model, self._options = model, options
        self._steer: SteerTarget = "none"
        self._strength = 1.0
        self._context = ""
        self._turns: list[dict[str, str]] = []
        self._words = ""  # those last said, without a context

    @property
    def prompt(self) -> str:
        """The text before the line that is typed: the target and the strength."""
        if self._steer == "none":
            return "> "
        return f"{self._steer}{'' if self._strength == 1 else f' x {self._strength:g}'}> "

    def take(self, line: str) -> None:
        """Do what a line asks for, or answer it. Raises JuiceError."""
        name, _, rest = line.partition(" ")
        match name:
            case "/steer":
                self.turn(rest.strip())
            case "/dial":
                self.dial(rest.strip())
            case "/context":
                self._context = rest.strip()
            case "/compare":
                self._compare()
            case "/forget":
                self._turns = []
            case "/help":
                for command, text in COMMANDS.items():
                    console.note(f"{command:10}{text}")
            case _ if name.startswith("/"):
                raise UsageError(f"{name} is no command; expected {', '.join(COMMANDS)}")
            case _:
                self._answer(line)

    def turn(self, target: str) -> None:
        """Steer toward a target from now on."""
        found = next((known for known in STEER_TARGETS if known == target), None)
        if found is None:
            raise UsageError(f"/steer is {target!r}; expected {', '.join(STEER_TARGETS)}")
        self._how(found, self._strength)  # reports that no head set serves it
        self._steer = found

    def dial(self, strength: str) -> None:
        """Set the strength."""
        try:
            value = float(strength)
        except ValueError:
            raise UsageError(f"/dial is {strength!r}; expected a number, such as 1.5") from None
        self._how(self._steer, value)
        self._strength = value

    def _answer(self, words: str) -> None:
        said = self._model.prompts.join_context(self._context, words) if self._context else words
        turns = [*self._turns, {"role": "user", "content": said}]
        pieces = []
        steer = self._how(self._steer, self._strength)
        for piece in self._model.stream(self._ids(turns), steer=steer, **self._options):
            pieces.append(piece)
            typer.echo(piece, nl=False)
        typer.echo()
        self._words = words
        self._turns = [*turns, {"role": "assistant", "content": "".join(pieces)}]

    def _compare(self) -> None:
        if not self._turns:
            raise RequestError("there is no answer yet; say something first")
        turns = self._turns[:-1]
        steers = []
        for target in console.TITLES:
            try:
                steers.append(self._how(target, self._strength))
            except JuiceError as error:
                console.note(f"juice: warning: {error}")
        whole = self._ids(turns)
        completions = self._model.generate(
            [whole] * len(steers),
            steer=steers,
            top_logprobs=console.N_CANDIDATES,
            **self._options,
        )
        alone = None
        if self._words != turns[-1]["content"]:  # a context went before the last words
            alone = self._ids([*turns[:-1], {"role": "user", "content": self._words}])
        console.show_three(self._model, completions, whole, alone)

    def _how(self, target: SteerTarget, strength: float) -> Any:
        from juice.engine.steer import Steer

        steer = Steer(target=target, strength=strength)
        self._model.resolve(steer)
        return steer

    def _ids(self, turns: list[dict[str, str]]) -> tuple[int, ...]:
        return self._model.prompts.encode(self._model.prompts.rendered(turns))
