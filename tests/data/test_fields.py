"""The columns of a data set, however it names them and writes its answers."""

from __future__ import annotations

from typing import Any

import pytest

from juice.data.readers.rows import columns_of, texts_of
from juice.errors import ExampleError, UsageError
from tests.support.user_data import rows


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("Lima", ("Lima",)),
        (42, ("42",)),
        (["Lima", " Lima ", "LIMA"], ("Lima", "LIMA")),
        ('["Lima", "Ciudad"]', ("Lima", "Ciudad")),
        ("[sic]", ("[sic]",)),
        ({"text": ["Lima"], "answer_start": [3]}, ("Lima",)),
        ("", ()),
        (None, ()),
        (True, ()),
        ([], ()),
        (["Lima", None], ()),
        ("[" * 100_000, ("[" * 100_000,)),
    ],
)
def test_answers_are_read_however_a_data_set_writes_them(
    value: Any, texts: tuple[str, ...]
) -> None:
    assert texts_of(value) == texts


def test_columns_may_have_other_names_and_a_missing_one_is_reported() -> None:
    fields = {"question": ("question", "instruction"), "context": ("context",)}
    data = rows({"instruction": "q", "passage": "c"})
    assert columns_of(data, fields, ("question", "context"), {"context": "passage"}) == {
        "question": "instruction",
        "context": "passage",
    }
    with pytest.raises(
        ExampleError,
        match=(
            "no column context; the rows have instruction, passage: name yours with --columns"
            " context=NAME"
        ),
    ):
        columns_of(data, fields, ("question", "context"), {})
    with pytest.raises(ExampleError, match="column 'p'; the rows have instruction"):
        columns_of(data, fields, (), {"context": "p"})
    with pytest.raises(UsageError, match="field 'contxt'; expected one of question, context"):
        columns_of(data, fields, (), {"contxt": "passage"})
