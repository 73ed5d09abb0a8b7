"""The turns of families of chat models, as their published templates write them, in short.

What a template does to the text of a turn (trim, strip, split at thoughts) is kept, and which of
its marks are tokens: [INST] is text to Llama 2 and a token to Mistral.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AddedToken, PreTrainedTokenizerFast

from tests.support.spellings import SPELLINGS

BYTES, TEKKEN = "byte-level", "tekken"
LLAMA, GEMMA = "Llama's SentencePiece", "Gemma's SentencePiece"
ASSISTANT = "{% if m.role == 'assistant' %}"
EACH, OTHERWISE, END_IF, END_EACH = (
    "{% for m in messages %}",
    "{% else %}",
    "{% endif %}",
    "{% endfor %}",
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A chat template, and the control tokens of the tokenizer that goes with it.

    `special` are special tokens, the first of which begins a text, and `added` those that are not,
    of which some begin a user's turn.
    """

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    of_users: tuple[str, ...] = ()
    spelling: str = BYTES
    takes_spaces: bool = False
    """Whether a control token takes the white space after it along, as Phi-3's do."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.special, *self.added)

    @property
    def sayable(self) -> tuple[str, ...]:
        """Those that a reply may hold, as the model wrote it."""
        return tuple(name for name in self.added if name not in self.of_users)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        made = PreTrainedTokenizerFast(
            tokenizer_object=SPELLINGS[self.spelling](),
            bos_token=self.special[0],
            eos_token=self.special[1],
            clean_up_tokenization_spaces=False,
        )
        special = [
            AddedToken(name, normalized=False, special=True, rstrip=self.takes_spaces)
            for name in self.special
        ]
        made.add_special_tokens({"additional_special_tokens": special})
        made.add_tokens([AddedToken(name, normalized=False) for name in self.added])
        return made


FAMILIES = {
    "ChatML": Family(
        template=EACH
        + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        + END_EACH
        + "<|im_start|>assistant\n",
        special=("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    ),
    "Qwen3": Family(
        template=EACH
        + ASSISTANT
        + "{% set said = m.content %}{% if '</think>' in said %}"
        "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "<|im_start|>assistant\n{{ said }}<|im_end|>\n"
        + OTHERWISE
        + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        + END_IF
        + END_EACH
        + "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        special=("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        added=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "Llama 2": Family(
        template=EACH
        + ASSISTANT
        + " {{ m.content.strip() }} {{ eos_token }}"
        + OTHERWISE
        + "{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]"
        + END_IF
        + END_EACH,
        special=("<s>", "</s>"),
        spelling=LLAMA,
    ),
    "Llama 3": Family(
        template="{{ bos_token }}"
        + EACH
        + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
        + END_EACH
        + "<|start_header_id|>assistant<|end_header_id|>\n\n",
        special=(
            "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
            "<|eom_id|>", "<|python_tag|>",
        ),
    ),
    "Mistral": Family(
        template="{{ bos_token }}"
        + EACH
        + ASSISTANT
        + "{{ m.content }}{{ eos_token }}"
        + OTHERWISE
        + "[INST]{{ m.content }}[/INST]"
        + END_IF
        + END_EACH,
        special=(
            "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
            "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
        ),
        spelling=TEKKEN,
    ),
    "Gemma": Family(
        template="{{ bos_token }}"
        + EACH
        + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n"
        + END_EACH
        + "<start_of_turn>model\n",
        special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        spelling=GEMMA,
    ),
    "Phi-3": Family(
        template=EACH
        + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
        + END_EACH
        + "<|assistant|>\n",
        special=("<s>", "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
        spelling=LLAMA,
        takes_spaces=True,
    ),
    "Zephyr": Family(
        template=EACH
        + "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"
        + END_EACH
        + "<|assistant|>\n",
        special=("<s>", "</s>"),
        spelling="Metaspace",
    ),
    "DeepSeek": Family(
        template="{{ bos_token }}"
        + EACH
        + ASSISTANT
        + "<｜Assistant｜>{{ (m.content.split('</think>') | last) }}{{ eos_token }}"
        + OTHERWISE
        + "<｜User｜>{{ m.content }}"
        + END_IF
        + END_EACH
        + "<｜Assistant｜><think>\n",
        special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        added=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>"),
        of_users=("<｜User｜>",),
    ),
    "Command R": Family(
        template="{{ bos_token }}"
        + EACH
        + "<|START_OF_TURN_TOKEN|>"
        + ASSISTANT
        + "<|CHATBOT_TOKEN|>"
        + OTHERWISE
        + "<|USER_TOKEN|>"
        + END_IF
        + "{{ m.content.strip() }}<|END_OF_TURN_TOKEN|>"
        + END_EACH
        + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        special=(
            "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
        ),
    ),
    "gpt-oss": Family(
        template=EACH
        + ASSISTANT
        + "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
        + OTHERWISE
        + "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
        + END_IF
        + END_EACH
        + "<|start|>assistant",
        special=(
            "<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>",
            "<|constrain|>", "<|call|>",
        ),
    ),
    "Granite": Family(
        template=EACH
        + "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
        + END_EACH
        + "<|start_of_role|>assistant<|end_of_role|>",
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
        added=("<|tool_call|>",),
    ),
    "GLM-4": Family(
        template="[gMASK]<sop>"
        + EACH
        + "<|{{ m.role }}|>\n{{ m.content }}"
        + END_EACH
        + "<|assistant|>\n",
        special=(
            "<sop>", "<|endoftext|>", "[gMASK]", "<|system|>", "<|user|>", "<|assistant|>",
            "<|observation|>",
        ),
    ),
}  # fmt: skip
"""The families, by name; no two write turns alike."""
