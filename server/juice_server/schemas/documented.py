"""Models whose fields are described by the text below them, in the OpenAPI document, too."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Documented(BaseModel):
    """The base of everything that clients send or get."""

    model_config = ConfigDict(use_attribute_docstrings=True)
