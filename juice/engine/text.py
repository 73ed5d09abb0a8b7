"""The text of tokens, piece by piece; for any tokenizer the joined pieces are the text.

A character may be split over tokens, and a token's spelling may depend on the one before it. So new
text is what decoding with the newest token adds to decoding without it, held back while it ends in
an incomplete character. One that the prompt only begins is whole in the answer. Text that may yet
turn out to begin a stop string is held back as well; a stop string and what follows it never
appear.

A `Transcript` is all that a request has generated so far, and tells its caller.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from juice.engine.answer import Completion, FinishReason, ScoredToken, Sink, Timing, Update
from juice.engine.request import Request
from juice.errors import JuiceError

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
N_PROMPT_TOKENS = 8
# A character has at most four bytes: what is still incomplete after 16 tokens never was one.
MAX_UNDECIDED, MAX_BYTES = 16, 4


class TextStream:
    """The text of one sequence; `push` returns what becomes final, `text` is all that is final.

    `stopped_by` is the stop string that has ended it, empty while none has.

    The last few tokens of the prompt decide how the first one is spelled. Special tokens have no
    text if these are skipped; else they are spelled out.
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
        self._n_prompt = len(self._ids)
        self._start, self._end = self._whole_characters()
        self._held = ""
        self.text = self.stopped_by = ""

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Return the text that one more token makes final; stop strings end it if it `may_stop`."""
        if token in self._special_ids:
            return ""
        self._ids.append(token)
        new, end = self._undecided(), len(self._ids)
        if new.endswith(INCOMPLETE):
            new, end = self._cut(new) if end - self._end > MAX_UNDECIDED else ("", end)
        elif not new and end - self._end > MAX_UNDECIDED:
            del self._ids[-1]  # so many have no text, as those that a tokenizer does not know
        if not new:
            return ""
        self._start, self._end = self._end, end
        return self._release(new, may_stop=may_stop)

    def finish(self) -> str:
        """End the text; return what was held back."""
        new = self._undecided()
        self._start = self._end = len(self._ids)
        return self._release(new, is_last=True)

    def _whole_characters(self) -> tuple[int, int]:
        """Return where the prompt's last tokens begin and end that are whole characters."""
        n = self._n_prompt
        for end in range(n, max(-1, n - MAX_BYTES), -1):
            for start in range(min(end, MAX_BYTES) or 1):
                text = self._decode(self._ids[start:end])
                if INCOMPLETE not in (text[:1], text[-1:]):
                    return start, end
        return 0, n

    def _undecided(self) -> str:
        """Return the new text of the tokens after `_end`, as it is spelled after those before."""
        text, end = self._decode(self._ids[self._start :]), max(self._end, self._n_prompt)
        before = self._decode(self._ids[self._start : end])
        # What was incomplete there, and is whole now, is new.
        while before.endswith(INCOMPLETE) and not text.startswith(before):
            end -= 1
            before = self._decode(self._ids[self._start : end])
        return text[len(before) :]

    def _cut(self, new: str) -> tuple[str, int]:
        """Return the undecided text that surely no later token can change, and where it ends."""
        end = len(self._ids)
        for at in range(end - 1, end - 1 - MAX_BYTES, -1):
            rest = self._decode(self._ids[at:])
            if (self._decode(self._ids[self._end : at]) + rest).endswith(new):
                return new[: len(new) - len(rest)], at
        return "", self._end

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text = self._tokenizer.decode(
            ids, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _release(self, new: str, *, may_stop: bool = True, is_last: bool = False) -> str:
        held, n_old = self._held + new, len(self._held)
        # One that is whole in what was held came too early to stop anything.
        froms = ((stop, max(0, n_old + 1 - len(stop))) for stop in self._stop if may_stop)
        found = [(at, stop) for stop, start in froms if (at := held.find(stop, start)) >= 0]
        if found:
            end, self.stopped_by = min(found)
            piece, self._held = held[:end], ""
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


class Transcript:
    """The tokens and the text of one request; it decides when they end, and sends the updates.

    `stop_token_ids` are at first the model's own, and then all that end this request.
    """

    def __init__(
        self, request: Request, text: TextStream, stop_token_ids: frozenset[int], sink: Sink
    ) -> None:
        options = request.options
        self.stop_token_ids = frozenset(options.stop_token_ids)
        if not options.ignore_eos:
            self.stop_token_ids |= stop_token_ids
        self.tokens: list[ScoredToken] = []
        self.prompt_tokens: list[ScoredToken] = (
            [ScoredToken(request.prompt_ids[0], None)] if options.prompt_logprobs else []
        )
        self.watched: tuple[float, ...] = ()
        self.n_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._request, self._text, self._sink = request, text, sink
        self._news, self._n_sent = "", 0
        self._queued_s = 0.0
        self._tokens_s: list[float] = []

    def start(self) -> None:
        """Record that the request no longer waits."""
        self._queued_s = time.monotonic() - self._request.arrived

    def add(self, tokens: Sequence[ScoredToken]) -> None:
        """Take the next tokens up to the one that ends the text, and send what they make final.

        Raises whatever a tokenizer or a sink raises.
        """
        for token in tokens:
            self._tokens_s.append(time.monotonic() - self._request.arrived)
            piece = self._text_of(token.id)
            self.tokens.append(token._replace(text=piece))
            self._news += piece
            if self.finish_reason is not None:
                return
        self._sink(self._update())

    def complete(self) -> None:
        """Send the last update: the completion of a finished request."""
        assert self.finish_reason is not None, "the request still runs"
        completion = Completion(
            text=self._text.text,
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason,
            steering=self._request.steering.report,
            n_prompt_tokens=len(self._request.prompt_ids),
            timing=Timing(queued_s=self._queued_s, tokens_s=tuple(self._tokens_s)),
            prompt_tokens=tuple(self.prompt_tokens),
            watched=self.watched,
            n_cached_tokens=self.n_cached_tokens,
            stop_string=self._text.stopped_by,
        )
        self._sink(self._update(completion))

    def fail(self, error: JuiceError) -> None:
        """Send an error as the last update."""
        self._sink(Update(index=self._request.index, error=error))

    def _text_of(self, token: int) -> str:
        """Return the text that the next token makes final, and note whether it is the last."""
        options = self._request.options
        if token in self.stop_token_ids:
            self.finish_reason = "stop"
            return self._text.finish()
        piece = self._text.push(token, may_stop=len(self.tokens) >= options.min_tokens)
        if self._text.stopped_by:
            self.finish_reason = "stop"
        elif len(self.tokens) + 1 == options.max_tokens:
            self.finish_reason = "length"
            piece += self._text.finish()
        return piece

    def _update(self, completion: Completion | None = None) -> Update:
        update = Update(
            index=self._request.index,
            text=self._news,
            tokens=tuple(self.tokens[self._n_sent :]),
            queued_s=self._queued_s,
            completion=completion,
        )
        self._news, self._n_sent = "", len(self.tokens)
        return update
