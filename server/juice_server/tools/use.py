"""What the functions that a chat offers mean for one model: its prompt, the form of its answer."""

from __future__ import annotations

from dataclasses import dataclass

from juice.engine import Structure
from juice.engine.structure import Structures
from juice.errors import RequestError
from juice_server.tools.formats import FORMATS, Format
from juice_server.tools.grammar import grammar_of
from juice_server.tools.offer import Offer
from juice_server.tools.reading import CallReader, Reader
from juice_server.tools.spelled import SpelledReader


@dataclass(frozen=True, eq=False)
class ToolUse:
    """How one model calls what a chat offers.

    Args:
        offer: The functions.
        form: How it writes calls.
        structure: The form of its whole answer; None: any.
    """

    offer: Offer
    form: Format
    structure: Structure | None

    def reader(self, prompt: str) -> Reader:
        """Return what reads one answer after a prompt."""
        if self.structure is None or self.form.spelling is None:
            return CallReader(self.form, self.offer, prompt)
        return SpelledReader(self.form.spelling, self.offer)


def use_of(
    offer: Offer,
    form: Format,
    structures: Structures,
    answer: Structure | None,
    answer_field: str | None,
) -> ToolUse:
    """Return how a model calls what a chat offers.

    Args:
        offer: The functions.
        form: How the model writes calls.
        structures: Those of the model's answers.
        answer: The form of an answer that calls nothing; None: any.
        answer_field: The field that gives it.

    Raises RequestError for what cannot be enforced.
    """
    if not offer.must_call and answer is not None and answer.form != "json_schema":
        raise RequestError(
            f"{answer_field} goes with tools only where it is JSON, or tool_choice asks for a call;"
            " leave one of them out",
            param=answer_field,
        )
    if not offer.is_enforced and answer is None:
        return ToolUse(offer, form, None)
    if answer is not None:
        try:
            structures.check(answer)
        except RequestError as error:
            error.param = answer_field
            raise
    if form.spelling is None and offer.must_call:
        form = FORMATS["json"]  # which nobody but the grammar has to know
    if form.spelling is None:
        raise RequestError(
            "this model's own form of calls cannot be enforced beside text; leave out strict and"
            " response_format, or ask for a call by tool_choice",
            param="tools",
        )
    schema = None if answer is None else answer.text
    return ToolUse(
        offer, form, grammar_of(offer, form.spelling, structures.special_tokens(), schema)
    )
