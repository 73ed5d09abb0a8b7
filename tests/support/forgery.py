"""Random contents of chats, made of control strings and of parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from juice.model.control_tokens import GUARD, TWIN
from juice.model.prompts import PromptForm

HARMLESS = ("<", "<|", "|>", "[", "]", " ", "\n", "Lima", "    ", "ordinary", "é", "/think")
OURS = (GUARD, TWIN[:1])


class Forger:
    """Makes chats for a template whose control tokens have these names.

    A reply may hold those that are `sayable`, as the model wrote them, and is given none.
    """

    def __init__(
        self, form: PromptForm, names: Sequence[str], *, sayable: Sequence[str] = (), seed: object
    ) -> None:
        self._form, self._names, self._rng = form, names, Random(str(seed))
        self._of_replies = [name for name in names if name not in sayable]
        self._known = {*map(form.tokenizer.convert_tokens_to_ids, names)}
        assert None not in self._known

    def content(self, names: Sequence[str] | None = None, share: float = 0.4) -> str:
        """Return a content of control strings, so many of its parts, and of parts of them."""
        n = self._rng.randrange(1, 12)
        return "".join(self._part(names or self._names, share) for _ in range(n))

    def _part(self, names: Sequence[str], share: float) -> str:
        name, drawn = self._rng.choice(names), self._rng.random()
        if drawn < share:
            return name
        if drawn < share + 0.2:  # two of which may meet
            at = self._rng.randrange(1, len(name))
            return self._rng.choice((name[:at], name[at:]))
        return self._rng.choice((*HARMLESS, *OURS))

    def chat(self, share: float = 0.4) -> list[dict[str, Any]]:
        """Return a chat of such contents."""
        of_turns = (self._names, self._of_replies, self._names)
        return _turns(*(self.content(names, share) for names in of_turns))

    def controls(self, ids: Sequence[int]) -> list[int]:
        """Return the control tokens among these."""
        return [token for token in ids if token in self._known]

    def assert_none_is_formed(self, n: int) -> None:
        """Assert that n chats have the control tokens of the same chat with harmless words."""
        harmless = self.controls(self._form.encode(self._form.rendered(_turns("x", "y", "z"))))
        for _ in range(n):
            chat = self.chat()
            ids = self._form.encode(self._form.rendered(chat))
            assert self.controls(ids) == harmless, chat

    def assert_harmless_tokens_stay(self, n: int) -> None:
        """Assert that n chats which form none without guards have the tokens that they have so."""
        tokenizer, n_compared = self._form.tokenizer, 0
        harmless = self.controls(self._plain(_turns("x", "y", "z")))
        while n_compared < n:
            chat = self.chat(share=0)
            plain = self._plain(chat)
            if self.controls(plain) == harmless:
                n_compared += 1
                ids = self._form.encode(self._form.rendered(chat))
                assert list(ids) == plain, (chat, tokenizer.decode(ids))

    def _plain(self, chat: list[dict[str, Any]]) -> list[int]:
        """Return a chat's tokens as transformers reads them."""
        tokenizer = self._form.tokenizer
        text = tokenizer.apply_chat_template(
            chat,
            chat_template=self._form.chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _turns(user: str, reply: str, last: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant", "user")
    return [{"role": r, "content": c} for r, c in zip(roles, (user, reply, last), strict=True)]
