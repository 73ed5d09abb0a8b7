"""The public names: all exist, they are sorted, and importing the package costs nothing."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import suppress

import pytest

import juice
from juice import uncollected


def test_every_public_name_exists_whatever_was_imported_before() -> None:
    import juice.identification.find

    assert juice.__all__ == sorted(juice.__all__)
    for name in juice.__all__:
        assert callable(getattr(juice, name)), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        juice.generat  # noqa: B018


HEAVY = (
    *("torch", "transformers", "numpy", "fastapi", "uvicorn"),
    *("datasets", "matplotlib", "pandas", "scipy", "jinja2"),
)
# What the evaluation, the analyses and the other engine need, and what comes along with it.
UNUSED = ("datasets", "matplotlib", "pandas", "pyarrow", "sklearn", "transformer_lens", "vllm")


@pytest.mark.parametrize(
    ("imports", "absent"),
    [("juice, juice.cli.main", HEAVY), ("juice_server.process, juice.loading", UNUSED)],
)
def test_the_help_and_the_server_import_nothing_heavy_that_they_do_not_need(
    imports: str, absent: tuple[str, ...]
) -> None:
    code = f"import sys, {imports}; sys.exit(', '.join({set(absent)} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_garbage_is_collected_again_after_imports() -> None:
    try:
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled()
        with suppress(ImportError), uncollected():
            raise ImportError
        assert gc.isenabled()
        gc.disable()
        with uncollected():
            pass
        assert not gc.isenabled(), "someone else has paused it"
    finally:
        gc.enable()
