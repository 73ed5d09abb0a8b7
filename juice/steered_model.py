"""SteeredModel: a loaded model with its head sets, ready to generate; what `juice.load` returns."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from juice.engine import Completion, Contrast, GenerationRequest, Limits, Sampling, Steer, Steering
from juice.engine.selfcheck import checked_engine
from juice.engine.steer import SteerTarget, contrasting, steering_of, unsteered
from juice.errors import HeadSetError, HeadSetMismatchError, RequestError, UsageError
from juice.head_set import HeadSet, HeadSetLibrary
from juice.head_set.schema import FORMAT, Method, short
from juice.model.loading import LoadedModel
from juice.model.prompts import own_template, read_template, sha256_of, user

DEFAULT_MAX_TOKENS = 64
SAMPLING_OPTIONS = frozenset(f.name for f in fields(Sampling))
REQUEST_OPTIONS = frozenset(f.name for f in fields(GenerationRequest)) - {
    "prompt_ids", "max_tokens", "steering", "sampling", "stop", "contrast",
}  # fmt: skip


class SteeredModel:
    """A model, its engine and the head sets that serve it; any thread may generate.

    Raises UnsupportedModelError when the engine and the model itself do not agree.
    """

    def __init__(self, loaded: LoadedModel, head_sets: str | Path | None = None, limits: Limits | None = None) -> None:
        self.loaded = loaded
        try:
            self.engine = checked_engine(loaded, limits)
        except BaseException:
            loaded.release()
            raise
        self._head_sets_folder = head_sets

    @cached_property
    def head_sets(self) -> HeadSetLibrary:
        """The head sets found for this model, scanned at first use; warns of those that were found through another chat template."""
        library = HeadSetLibrary.scan(self._head_sets_folder, self.loaded.identity)
        own = self._own_template_sha256
        for head_set in library.by_name.values():
            if (found := head_set.chat_template_sha256) not in (None, own, self.loaded.prompts.sha256):
                warnings.warn(
                    f"head set {head_set.name!r} was found through the chat template {short(found)}, that of {self.id} is "
                    f"{short(own) if own else 'none'}: it may steer less well",
                    stacklevel=2,
                )
        return library

    @property
    def id(self) -> str:
        """The model's id, as it was loaded."""
        return self.loaded.identity.id

    def with_chat_template(self, template: str | Path | None = "default") -> SteeredModel:
        """Return the same model, its engine shared, taking every prompt that is text as a user's message in a chat.

        `template` is the tokenizer's own ("default"), a file, or a template's text; with None prompts are taken as they are. Raises
        UsageError where the tokenizer has no template, or the file cannot be read.
        """
        if isinstance(template, Path) or (template not in (None, "default") and not re.search("{[{%]", template)):
            template = read_template(Path(template))
        elif template == "default":
            template = own_template(self.loaded.tokenizer)
            if template is None:
                raise UsageError(
                    f"the tokenizer of {self.id} has no chat template; give a Jinja file (--chat-template FILE), or leave --chat-template "
                    "out to take prompts as they are"
                )
        other = copy(self)
        other.loaded = replace(self.loaded, chat_template=template)
        if template is not None and len({other.loaded.prompts.rendered([user(word)]) for word in ("lemon", "plum")}) < 2:
            raise UsageError("the chat template leaves out what the user says; give one that renders the messages it gets")
        return other

    def in_form_of(self, head_set: HeadSet) -> SteeredModel:
        """Return the same model taking prompts in the form in which a head set was found: as they are, or through its chat template.

        Raises UsageError where the model was told to use another form, or its tokenizer's template is not the set's.
        """
        found, here = head_set.chat_template_sha256, self.loaded.prompts.sha256
        if head_set.identification is None or found == here:
            return self
        if found is None:
            raise UsageError(f"head set {head_set.name!r} was found on prompts as they are; leave --chat-template out")
        own = self._own_template_sha256
        if here is None and own == found:
            return self.with_chat_template()
        given = f"the one given is {short(here)}" if here else f"the tokenizer's own is {short(own) if own else 'none'}"
        raise UsageError(
            f"head set {head_set.name!r} was found through the chat template {short(found)}, {given}; give the set's own file with "
            "--chat-template FILE"
        )

    def close(self) -> None:
        """End the engine with everything that runs, and the other ranks of a sharded model; a model object can be loaded again."""
        self.engine.close()
        self.loaded.release()

    def generate(self, prompts: str | Sequence[str], **options: Any) -> list[Completion]:
        """Continue every prompt; all of them share batches, each with its own options.

        Options, each a value for all prompts or a list of one a prompt: `steer` ("none", "context", "parametric" or a
        `Steer`), `strength` 1.0, `head_set` (name or HeadSet), `context` (text that is read before the prompt; the method `cad`
        needs it apart), `max_tokens` 64, `min_tokens`, `stop` (a string or a tuple of
        strings), `stop_token_ids` (a tuple), `ignore_eos`, `top_logprobs`, and those of `Sampling`: `temperature` 0, `top_p`
        1, `top_k` 0, `min_p` 0, `repetition_penalty` 1, `presence_penalty` 0, `frequency_penalty` 0, `logit_bias`, `seed`.
        Raises RequestError and HeadSetError.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        each = [{name: _value_of(name, value, i, len(texts)) for name, value in options.items()} for i in range(len(texts))]
        return self.engine.generate([self.request(text, **own) for text, own in zip(texts, each, strict=True)])

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """Continue one prompt, yielding its text piece by piece; options as in `generate`."""
        return (update.text for update in self.engine.stream([self.request(prompt, **options)]) if update.text)

    def next_token(self, prompt: str, *, top: int = 10, **options: Any) -> list[tuple[str, float]]:
        """Return the likeliest next tokens and their probabilities; options as in `generate`."""
        vocabulary = range(min(len(self.loaded.tokenizer), self.loaded.vocabulary_size))
        request = replace(self.request(prompt, **{**options, "max_tokens": 1}), watch=tuple(vocabulary))
        logprobs = self.engine.generate([request])[0].watched
        best = sorted(vocabulary, key=lambda token: -logprobs[token])[:top]
        return [(self.loaded.tokenizer.decode([token]), math.exp(logprobs[token])) for token in best]

    def request(
        self,
        prompt: str | Sequence[int],
        *,
        steer: SteerTarget | Steer = "none",
        strength: float | None = None,
        head_set: str | HeadSet | None = None,
        context: str | None = None,
        without_context: str | Sequence[int] | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: str | Sequence[str] | None = None,
        **options: Any,
    ) -> GenerationRequest:
        """Turn a prompt, text or tokens, and its options into a request for the engine.

        Options are those of `generate`, and `watch` and `prompt_logprobs` of GenerationRequest. Where the prompt has its context
        in it, `without_context` is the prompt without. Raises RequestError, also for an option that there is not, and HeadSetError.
        """
        if context is not None:
            if not isinstance(prompt, str) or without_context is not None:
                raise RequestError("context goes before a prompt that is text and has none of its own", param="context")
            prompt, without_context = join_context(context, prompt), prompt
        spec = steer if isinstance(steer, Steer) else Steer(target=steer)
        if strength is not None:
            spec = replace(spec, strength=strength)
        if unknown := options.keys() - SAMPLING_OPTIONS - REQUEST_OPTIONS:
            raise RequestError(f"there is no option {min(unknown)!r}; see SteeredModel.generate", param=min(unknown))
        return GenerationRequest(
            prompt_ids=self.tokenize(prompt) if isinstance(prompt, str) else tuple(prompt),
            max_tokens=max_tokens,
            steering=self.steering(spec, head_set),
            contrast=self._contrast(spec, without_context),
            sampling=Sampling(**{name: value for name, value in options.items() if name in SAMPLING_OPTIONS}),
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            **{name: value for name, value in options.items() if name in REQUEST_OPTIONS},
        )

    def _contrast(self, steer: Steer, without_context: str | Sequence[int] | None) -> Contrast | None:
        if steer.method != "cad" or not steer.strength:
            return None
        if without_context is None:
            raise RequestError("method cad needs the context apart from the prompt; give it as `context`", param="context")
        ids = self.tokenize(without_context) if isinstance(without_context, str) else tuple(without_context)
        return Contrast(prompt_ids=ids, weight=steer.strength)

    def tokenize(self, prompt: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return a prompt's tokens, as the tokenizer itself makes them or through the chat template; raises RequestError for one without.

        `add_special_tokens` is for prompts as they are: a template writes its own.
        """
        if not prompt:
            raise RequestError("the prompt is empty; expected some text", param="prompt")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not text: {error.reason} at character {error.start}; send valid Unicode", param="prompt"
            ) from error
        if not add_special_tokens and self.loaded.chat_template is None:
            return tuple(self.loaded.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        return self.loaded.prompts.tokens(prompt)

    def steering(self, steer: Steer, head_set: str | HeadSet | None = None) -> Steering:
        """Return what a request's rows get; raises HeadSetError when no set serves, or the one given does not fit."""
        if head_set is None:
            head_set = steer.head_set
        if steer.target == "none":
            if head_set is not None:
                raise RequestError("head_set is given, but steer is none; name a target: context or parametric", param="steer.target")
            return unsteered(steer)
        if steer.method == "cad":
            if head_set is not None:
                raise RequestError("head_set is given, but method cad uses no heads; drop it", param="steer.head_set")
            return contrasting(steer)
        if isinstance(head_set, HeadSet):
            head_set.check_fits(self.loaded.identity)
            chosen = head_set
        else:
            chosen = self.head_sets.get(steer.target if head_set is None else head_set)
        self._check_heads(chosen)
        if chosen.target != steer.target:
            raise RequestError(
                f"head set {chosen.name!r} steers toward {chosen.target}, the request asks for {steer.target}; name a set of that target",
                param="steer.head_set",
            )
        return steering_of(steer, chosen, self.loaded.prompts.sha256)

    @property
    def _own_template_sha256(self) -> str | None:
        return sha256_of(own_template(self.loaded.tokenizer))

    def _check_heads(self, head_set: HeadSet) -> None:
        """Raise HeadSetMismatchError for a head that its layer does not have: layers of one model may differ."""
        for head in (*head_set.heads.plus, *head_set.heads.minus):
            n_heads = self.loaded.layout.layers[head.layer].n_heads
            if head.index >= n_heads:
                raise HeadSetMismatchError(
                    f"head {head} is out of range: layer {head.layer} of {self.id} has {n_heads} heads (0-{n_heads - 1})"
                )

    def make_head_set(
        self,
        *,
        name: str,
        target: str,
        plus: Sequence[tuple[int, int]] = (),
        minus: Sequence[tuple[int, int]] = (),
        beta_plus: float | None = None,
        beta_minus: float | None = None,
        method: Method = "juice",
    ) -> HeadSet:
        """Make a head set by hand for this model; raises HeadSetError for heads out of range or betas of the wrong sign.

        Without betas, every request must give its own. A sign that has no heads needs none.
        """
        beta = None
        if beta_plus is not None or beta_minus is not None:
            if (plus and beta_plus is None) or (minus and beta_minus is None):
                raise HeadSetError("one beta is given, the other is missing; give both, or neither")
            beta = {method: {"plus": beta_plus or 0.0, "minus": beta_minus or 0.0}}
        content = {
            "format": FORMAT, "name": name, "target": target, "model": self.loaded.identity.model_dump(),
            "heads": {"plus": [list(head) for head in plus], "minus": [list(head) for head in minus]}, "beta": beta,
        }  # fmt: skip
        return HeadSet.parse(content, f"head set {name!r}")


def join_context(context: str, prompt: str) -> str:
    """Put a context before a prompt, with a space between where neither brings white space."""
    glue = "" if not context or context[-1].isspace() or prompt[:1].isspace() else " "
    return f"{context}{glue}{prompt}"


def _value_of(name: str, value: Any, index: int, n_prompts: int) -> Any:
    """Return a prompt's own value of an option that is given as a list; a tuple is one value."""
    if not isinstance(value, list):
        return value
    if len(value) != n_prompts:
        raise RequestError(f"{name} lists {len(value)} values for {n_prompts} prompts; give one a prompt", param=name)
    return value[index]
