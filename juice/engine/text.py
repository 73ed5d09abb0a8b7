"""From tokens to text, piece by piece; for any tokenizer the joined pieces are the text.

A character may be split over tokens, and a token's spelling may depend on the one before it. So new
text is what decoding with the newest token adds to decoding without it, held back while it ends in
an incomplete character. Text that may yet turn out to begin a stop string is held back as well; a
stop string and what follows it never appear.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
N_PROMPT_TOKENS = 8
# A character has at most four bytes: what is still incomplete after 16 tokens never was one.
MAX_UNDECIDED, MAX_BYTES = 16, 4


class TextStream:
    """The text of one sequence; `push` returns what becomes final, `text` is all that is final.

    Args:
        tokenizer: The model's tokenizer.
        prompt_ids: The tokens before the text; the last few decide how the first is spelled.
        stop: The stop strings.
        special_ids: Tokens without text.
        skip_special_tokens: Whether these have none; else they are spelled out.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        special_ids: Collection[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._special_ids = special_ids if skip_special_tokens else ()
        self._stop = tuple(stop)
        self._ids = list(prompt_ids[-N_PROMPT_TOKENS:])
        self._start, self._end = 0, len(self._ids)
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Take one token; return the text that is now final, perhaps none.

        Unless it `may_stop`, stop strings are let through.
        """
        if token in self._special_ids:
            return ""
        self._ids.append(token)
        new, end = self._undecided(), len(self._ids)
        if new.endswith(INCOMPLETE) and end - self._end > MAX_UNDECIDED:
            new, end = self._cut(new)
        elif new.endswith(INCOMPLETE):
            return ""
        if not new:
            return ""
        self._start, self._end = self._end, end
        if not may_stop:
            self.text += new
            return new
        return self._release(new, is_last=False)

    def finish(self) -> str:
        """End the text; return what was held back."""
        new = self._undecided()
        self._start = self._end = len(self._ids)
        return self._release(new, is_last=True)

    def _undecided(self) -> str:
        """Return the text of the tokens after `_end`, spelled as it is after those before them."""
        before = self._decode(self._ids[self._start : self._end])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _cut(self, new: str) -> tuple[str, int]:
        """Return the part of the undecided text that no later token can change, and where it ends.

        The part is empty where that is not certain.
        """
        end = len(self._ids)
        for at in range(end - 1, end - 1 - MAX_BYTES, -1):
            rest = self._decode(self._ids[at:])
            if self._decode(self._ids[self._end : at]) + rest == new:
                return new[: len(new) - len(rest)], at
        return "", self._end

    def _decode(self, ids: list[int]) -> str:
        return (
            str(
                self._tokenizer.decode(
                    ids, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False
                )
            )
            if ids
            else ""
        )

    def _release(self, new: str, *, is_last: bool) -> str:
        held = self._held + new
        ends = [at for stop in self._stop if (at := held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            piece, self._held = held[: min(ends)], ""
        else:
            n_kept = 0 if is_last else self._n_ambiguous(held)
            piece, self._held = held[: len(held) - n_kept], held[len(held) - n_kept :]
        self.text += piece
        return piece

    def _n_ambiguous(self, held: str) -> int:
        """Return the length of the longest suffix of `held` that a stop string begins with."""
        longest = min(len(held), max((len(stop) for stop in self._stop), default=1) - 1)
        return next(
            (n for n in range(longest, 0, -1) if any(s.startswith(held[-n:]) for s in self._stop)),
            0,
        )
