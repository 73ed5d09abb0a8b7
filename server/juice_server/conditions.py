"""The conditions of a request (RFC 9110, section 13): whether what is there is what it expects."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from starlette.datastructures import Headers

from juice.errors import RequestError
from juice_server.errors import PreconditionError

TAG = r'(?:W/)?"[^"]*"'
TAGS = re.compile(rf"\s*{TAG}(?:\s*,\s*{TAG})*\s*")
ANY = "*"


def tag_of(sha256: str) -> str:
    """Return the entity tag of a hash."""
    return f'"{sha256}"'


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a request expects: one of these tags, `*` for anything; None where it does not say.

    Args:
        match: If-Match: it must be there, and one of these.
        none_match: If-None-Match: it must not.
    """

    match: frozenset[str] | None = None
    none_match: frozenset[str] | None = None

    @classmethod
    def of(cls, headers: Headers) -> Self:
        """Return the conditions in a request's headers; raises RequestError."""
        return cls(match=_tags(headers, "if-match"), none_match=_tags(headers, "if-none-match"))

    def check(self, name: str, found: str | None) -> None:
        """Raise PreconditionError unless what is there is what was expected.

        Args:
            name: What it is called, for the message.
            found: Its hash; None: it is not there.
        """
        there = set() if found is None else {ANY, tag_of(found)}
        if self.match is not None and not self.match & there:
            now = "is not there" if found is None else f"is {tag_of(found)} now"
            raise PreconditionError(
                f"{name!r} {now}, and If-Match expects another; read it again, and send what it "
                "says with the change"
            )
        if self.none_match is not None and self.none_match & there:
            raise PreconditionError(
                f"{name!r} is there already, which If-None-Match excludes; send If-Match with its "
                "ETag to replace it"
            )


def _tags(headers: Headers, name: str) -> frozenset[str] | None:
    values = headers.getlist(name)
    if not values:
        return None
    text = ",".join(values)
    if text.strip() == ANY:
        return frozenset({ANY})
    if not TAGS.fullmatch(text):
        raise RequestError(
            f"{name} is {text!r}; expected * or tags in quotes, as an ETag has them", param=name
        )
    return frozenset(re.findall(TAG, text))
