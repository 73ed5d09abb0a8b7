"""A model that replies from a script: whatever a chat model might say, word for word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from juice.progress import Progress, silent

OPENED = "\0"


@dataclass(frozen=True)
class Said:
    text: str


@dataclass
class ScriptedModel:
    """Replies to prompts that hold a question of the script. The tokens of prompts are their
    characters, those of replies their words.

    Args:
        script: The reply to each question.
        repeats: Whether it begins its reply anew after an opening.
        chat_template_sha256: The hash of the template that it says it uses.
    """

    script: Mapping[str, str]
    repeats: bool = False
    chat_template_sha256: str | None = None

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_tokens: int,
        progress: Progress = silent,  # noqa: ARG002
    ) -> list[Said]:
        return [Said(" ".join(self._reply(prompt).split(" ")[:max_tokens])) for prompt in prompts]

    def _reply(self, prompt: str | Sequence[int]) -> str:
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        (question,) = [q for q in self.script if q in text]
        _, _, opening = text.partition(OPENED)
        reply = self.script[question]
        return reply if self.repeats else reply[reply.index(opening) + len(opening) :]

    def tokenize(self, prompt: str, *, opening: str = "") -> tuple[int, ...]:
        return tuple(map(ord, f"{prompt}{OPENED}{opening}"))

    def fits(self, prompt: str | Sequence[int], *, max_tokens: int) -> bool:
        return len(prompt) + max_tokens <= 4096

    def first_token(self, prompt: str, answer: str, *, opening: str = "") -> int | None:  # noqa: ARG002
        return ord(answer[0]) if answer else None

    def answer_logprobs(
        self, pairs: Sequence[tuple[str, str]], *, progress: Progress = silent
    ) -> list[tuple[float, ...] | None]:
        raise NotImplementedError
