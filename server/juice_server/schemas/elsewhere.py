"""Fields of other servers and other routes that would change an answer: they are refused by name.

A route that has a field of such a name serves it; any other may get it only with a value that asks
for nothing. What no list has is ignored: clients send much that changes no answer, such as `user`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Elsewhere:
    """A field that is not served.

    Args:
        harmless: The values that ask for nothing.
        instead: What to do.
    """

    harmless: tuple[Any, ...] = ()
    instead: str = "leave it out"

    def is_unused(self, value: Any) -> bool:
        """Return whether a value asks for nothing, as null does, alone or in an object."""
        if isinstance(value, dict):
            value = {name: own for name, own in value.items() if own is not None}
        return value is None or any(
            value == own and isinstance(value, bool) == isinstance(own, bool)
            for own in self.harmless
        )


def _family(names: Iterable[str], instead: str, *harmless: Any) -> dict[str, Elsewhere]:
    return {name: Elsewhere(harmless, instead) for name in names}


# Words for the same by those who made other servers: llama.cpp, Ollama, TGI, SGLang, Mistral.
TOKEN_COUNTS = _family(
    ("max_new_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict"),
    "use max_tokens",
) | _family(("min_new_tokens",), "use min_tokens", 0)
FORMS = _family(
    (
        *("grammar", "ebnf", "regex", "choice", "json_schema", "response_schema", "format"),
        *("structural_tag", "output_format", "output_config", "text"),
    ),
    "use response_format or structured_outputs",
    {},
) | {
    "json_object": Elsewhere((False,), "use response_format"),
    "guided_whitespace_pattern": Elsewhere(
        (), "a grammar in structured_outputs can say what white space there may be"
    ),
}
THINKING = {
    **_family(
        ("enable_thinking", "think", "thinking_budget", "thinking_token_budget"),
        "what the model's template takes goes into chat_template_kwargs",
    ),
    **_family(
        ("reasoning_effort", "effort"),
        "there is no effort to choose; what the model's template takes goes into"
        " chat_template_kwargs",
        "none",
    ),
    "reasoning": Elsewhere(
        ({}, {"effort": "none"}),
        "what the model's template takes goes into chat_template_kwargs",
    ),
    "thinking": Elsewhere(
        ({"type": "disabled"},), "what the model's template takes goes into chat_template_kwargs"
    ),
    "include_reasoning": Elsewhere((True,), "leave reasoning_content of the answer unread"),
    "verbosity": Elsewhere(("medium",)),
}
TEMPLATES = {
    "chat_template": Elsewhere((), "serve the model with it (--chat-template FILE)"),
    "chat_template_kwargs": Elsewhere(({},), "use /v1/chat/completions"),
    "documents": Elsewhere(([],), "use context, or /v1/chat/completions"),
    "add_generation_prompt": Elsewhere((True,), "use /v1/chat/completions"),
    "continue_final_message": Elsewhere((False,), "use /v1/chat/completions"),
    "add_special_tokens": Elsewhere((False,), "a chat template writes them itself"),
    "tools": Elsewhere(([],), "use /v1/chat/completions"),
    "tool_choice": Elsewhere(("none", "auto"), "use /v1/chat/completions"),
    "functions": Elsewhere(([],), "use tools"),
    "function_call": Elsewhere(("none", "auto"), "use tool_choice"),
    "max_tool_calls": Elsewhere((), "parallel_tool_calls: false allows one call"),
}
# What other routes call the text that is answered or continued.
TEXTS = {
    **_family(("system", "instructions"), "use a message with the role system", "", []),
    **_family(("input", "messages", "prompt"), "this route has another field for the text", ""),
    "suffix": Elsewhere(("",)),
    "echo": Elsewhere((False,), "use /v1/completions"),
    "negative_prompt": Elsewhere(("",)),
    "prompt_embeds": Elsewhere(),
}
SAMPLING = {
    "allowed_token_ids": Elsewhere(([],), "use logit_bias"),
    "bad_words": Elsewhere(([],), "use logit_bias"),
    "suppress_tokens": Elsewhere(([],), "use logit_bias"),
    "best_of": Elsewhere((1,), "use n"),
    "do_sample": Elsewhere((True,), "use temperature"),
    "eos_token_id": Elsewhere((), "use stop_token_ids"),
    "include_stop_str_in_output": Elsewhere((False,)),
    "length_penalty": Elsewhere((1,)),
    "logits_processors": Elsewhere(([],)),
    "random_seed": Elsewhere((), "use seed"),
    "repeat_penalty": Elsewhere((1,), "use repetition_penalty"),
    "stop_sequences": Elsewhere(([],), "use stop"),
    "truncate_prompt_tokens": Elsewhere((), "send a shorter prompt"),
    "truncation": Elsewhere(("disabled",), "send a shorter prompt"),
    "use_beam_search": Elsewhere((False,)),
    **_family(("guidance_scale", "typical_p"), "leave it out", 1),
    **_family(("top_a", "mirostat", "dry_multiplier", "xtc_probability"), "leave it out", 0),
    **_family(("lora_path", "lora_adapter", "adapter_id"), "serve the model with it"),
}
ANSWERS = {
    **_family(
        ("logprobs", "top_logprobs"),
        "use /v1/chat/completions or /v1/completions, or on /v1/responses include",
        *(False, 0),
    ),
    "prompt_logprobs": Elsewhere((0,), "use /v1/completions with echo and logprobs"),
    **_family(("return_token_ids", "return_tokens_as_token_ids"), "use /tokenize", False),
    "spaces_between_special_tokens": Elsewhere((True,)),
    "audio": Elsewhere(),
    "modalities": Elsewhere((["text"],)),
    "prediction": Elsewhere(),
    "web_search_options": Elsewhere(),
}
ELSEWHERE = {
    **TOKEN_COUNTS,
    **FORMS,
    **THINKING,
    **TEMPLATES,
    **TEXTS,
    **SAMPLING,
    **ANSWERS,
}
