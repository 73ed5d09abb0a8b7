"""JuiceLM: the harness's requests in, log-likelihoods and texts of a steered model out.

It tokenizes and cuts as the harness's own class `hf` does, so with `steer=none` both give the same
numbers, up to rounding. One difference: a window of a long text has one token less, since the
engine counts the last token that is scored, too.

Every token is steered, those of a choice too, as if the model had written it. A gate decides once
for each context, at its end, so all choices of a question share the decision.

Source: `lm_eval.models.huggingface.HFLM`, lm-eval 0.4.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from juice.engine.answer import Completion
from juice.engine.request import MAX_STOPS, Request
from juice.engine.sampling_options import SamplingOptions
from juice.engine.steer import Steer
from juice.errors import ContextLengthError, RequestError, UsageError
from juice.loading import load
from juice.steered_model import SteeredModel
from juice.version import __version__

Ids = tuple[int, ...]


N_NEW_TOKENS = 256
UNBOUNDED = 2048
LOADING = frozenset(signature(load).parameters) - {"model", "tokenizer", "limits"}
STEERING = ("steer", "strength", "head_set", "beta_plus", "beta_minus", "method", "gate")
Scored = tuple[float, bool]
TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("juice")
class JuiceLM(TemplateLM):
    """A steered model for `lm_eval`.

    Args:
        pretrained: A hub id, a local folder, `mini`, or a model that `juice.load` returned.
        steer: What wins a conflict: `context`, `parametric` or `none`; or a `juice.Steer`.
        max_length: Tokens that a prediction can see; None: one less than can be scored.
        max_gen_toks: New tokens of an answer, where a task does not say.
        batch_size: Ignored: the engine fills its batches by itself.
        max_batch_size: Ignored, too.
        **options: The other fields of `juice.Steer` (`strength`, `head_set`, `beta_plus`,
            `beta_minus`, `method`, `gate`), and what `juice.load` takes: `head_sets`, `device`,
            `dtype`, `revision`, `engine` and so on.

    Raises:
        JuiceError: An option is unknown or cannot be used, no head set serves the steering, or the
            model cannot be loaded.
    """

    def __init__(
        self,
        pretrained: str | Path | SteeredModel = "mini",
        *,
        steer: str | Steer = "none",
        max_length: int | None = None,
        max_gen_toks: int = N_NEW_TOKENS,
        batch_size: int | str | None = None,  # noqa: ARG002
        max_batch_size: int | None = None,  # noqa: ARG002
        **options: Any,
    ) -> None:
        super().__init__()
        if unknown := options.keys() - LOADING - set(STEERING):
            raise UsageError(
                f"model_args names {min(unknown)!r}; expected pretrained, max_length, "
                f"max_gen_toks, {', '.join((*STEERING, *sorted(LOADING)))}"
            )
        loading = {name: value for name, value in options.items() if name in LOADING}
        fields = {name: value for name, value in options.items() if name not in LOADING}
        if isinstance(steer, Steer):
            if fields:
                raise UsageError(f"{min(fields)} is given beside a Steer; put it into the Steer")
            asked = steer
        else:
            asked = Steer(target=steer, **fields)  # type: ignore[arg-type]
        if asked.positions != "all" or isinstance(asked.strength, tuple):
            raise UsageError(
                "a task's prompts do not say where the question begins, nor where an answer does; "
                "leave positions out, and give strength as one number"
            )
        if isinstance(pretrained, SteeredModel):
            # lm_eval names a device even for a model that it does not load.
            if given := sorted(loading.keys() - {"device"}):
                raise UsageError(f"{given[0]} is given for a model that is loaded; drop it")
            model = pretrained
        else:
            # lm_eval's own default; on a machine without a GPU, `hf` runs on the CPU, too.
            if loading.get("device") == "cuda:0" and not torch.cuda.is_available():
                del loading["device"]
            model = load(pretrained, **loading)
        model.resolve(asked)  # reports what is wrong before a task is built
        self.model, self.steer = model, asked
        self._prompted = model  # the same, which takes prompts as the harness gives them
        self.tokenizer = model.description.tokenizer
        self.max_gen_toks = max_gen_toks
        self._limit = model.engine.limits.max_model_len or UNBOUNDED + 1
        most = (model.engine.max_scored_tokens or self._limit) - 1
        if max_length is not None and not 1 <= max_length <= most:
            raise UsageError(
                f"max_length is {max_length}; expected 1 to {most}, one less than the tokens that "
                f"can be scored with {model.id}"
            )
        self.max_length = max_length or most

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has nothing before it."""
        first: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, by which the harness keeps its requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_unused: Any
    ) -> list[int]:
        """Return the tokens of a text; one that begins with the first token gets no second."""
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if not special and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            special = {"add_special_tokens": False}
        return list(self.model.prompts.encode(string, **special))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a chat as a prompt; from now on, prompts are taken as chats."""
        if self._prompted is self.model:
            prompted = self.model.with_chat_template()
            prompted.resolve(self.steer)
            self._prompted = prompted
        return self._prompted.prompts.rendered(
            chat_history,
            {
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": not add_generation_prompt,
            },
        )

    def get_model_info(self) -> dict[str, Any]:
        """Return the record in the results: versions, weights, and the steering without a gate."""
        description, report = self.model.description, self._prompted.resolve(self.steer).report
        return {
            "juice_version": __version__,
            "model_fingerprint": description.identity.fingerprint,
            "model_revision": description.identity.revision,
            "model_dtype": description.dtype,
            "steering": {**report.to_dict(), "gate": self.steer.gate},
        }

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, **_unused: Any
    ) -> list[Scored]:
        """Return each continuation's log-probability, and whether it is the greedy one."""
        pairs = [(tuple(context), tuple(new)) for _, context, new in requests]
        for _, new in pairs:
            if len(new) > self.max_length:
                raise ContextLengthError(
                    f"a continuation has {len(new)} tokens; the context has {self.max_length}: "
                    "shorten it",
                    param="prompt",
                )
        how = self._steers_after([context[-self.max_length :] for context, _ in pairs])
        asked = [
            self._prompted.request(
                (*context, *new)[-(self.max_length + 1) :],
                steer=steer,
                max_tokens=0,
                prompt_logprobs=True,
                top_logprobs=1,
            )
            for (context, new), steer in zip(pairs, how, strict=True)
        ]
        scored: dict[int, Scored] = {}
        for i, completion in self._done(asked, "scoring", disable_tqdm):
            tokens = completion.prompt_tokens[len(asked[i].prompt_ids) - len(pairs[i][1]) :]
            logprob = sum(token.logprob or 0.0 for token in tokens)
            scored[i] = logprob, all(token.id == token.top[0][0] for token in tokens)
            if (texts := requests[i][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", texts, scored[i])
        return [scored[i] for i in range(len(asked))]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, in windows where it is long."""
        if self.steer.gate == "auto":
            raise UsageError(
                "gate is auto, but a whole text has no prompt at whose end a gate could decide; "
                "leave gate out for rolling tasks"
            )
        windows: list[TokenRequest] = []
        counts = []
        for (text,) in (request.args for request in requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            of_text = [make_disjoint_window(window) for window in rolling]
            windows += [(None, context, new) for context, new in of_text]
            counts.append(len(of_text))
        scored = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = [sum(next(scored)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return an answer to each prompt, up to its stop strings."""
        stops: list[list[str]] = []
        asked = []
        for prompt, options in (request.args for request in requests):
            given = dict(normalize_gen_kwargs(options, self.max_gen_toks))
            stops.append([text for text in given.pop("until") if text])
            asked.append(self._generating(prompt, stops[-1], given))
        texts: dict[int, str] = {}
        for i, completion in self._done(asked, "generating", disable_tqdm):
            text = completion.text
            for stop in stops[i]:  # more than the engine takes
                text = text.split(stop)[0]
            texts[i] = text
            self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return [texts[i] for i in range(len(asked))]

    def _generating(self, prompt: str, stops: list[str], given: dict[str, Any]) -> Request:
        n_new, do_sample = given.pop("max_gen_toks"), given.pop("do_sample")
        if not do_sample:  # nothing is drawn, whatever a task says
            given = {name: v for name, v in given.items() if name not in ("top_p", "top_k")}
        elif "seed" not in given:
            # From the generator that the harness seeds: repeats differ, runs do not.
            given["seed"] = int(torch.randint(2**31, ()))
        if unknown := given.keys() - SamplingOptions.model_fields.keys():
            raise RequestError(
                f"the generation option {min(unknown)!r} is not known; expected until, "
                f"max_gen_toks, do_sample, {', '.join(SamplingOptions.model_fields)}",
                param=min(unknown),
            )
        ids = tuple(self.tok_encode(prompt))
        room = self._limit - n_new
        return self._prompted.request(
            ids[-room:] if room > 0 else ids,
            steer=self.steer,
            max_tokens=n_new,
            stop=tuple(stops[:MAX_STOPS]),
            **given,
        )

    def _steers_after(self, contexts: Sequence[Ids]) -> list[Steer]:
        """Return the steering of each context's continuation, which a gate may leave alone."""
        if self.steer.gate != "auto":
            return [self.steer] * len(contexts)
        unique = list(dict.fromkeys(contexts))
        asked = [self._prompted.request(ids, steer=self.steer, max_tokens=1) for ids in unique]
        done = self.model.engine.generate(asked)
        is_on = {ids: c.steering.applied for ids, c in zip(unique, done, strict=True)}
        always, never = replace(self.steer, gate=None), Steer(target="none")
        return [always if is_on[ids] else never for ids in contexts]

    def _done(
        self, asked: list[Request], description: str, disable_tqdm: bool
    ) -> Iterator[tuple[int, Completion]]:
        """Run requests; yield each one's number and completion as it is done."""
        with tqdm(total=len(asked), desc=description, disable=disable_tqdm) as bar:
            for update in self.model.engine.stream(asked, only_last=True):
                if update.completion is not None:
                    bar.update()
                    yield update.index, update.completion
