"""The public names: all exist, they are sorted, and importing the package costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import juice


def test_every_public_name_exists_whatever_was_imported_before() -> None:
    import juice.identification.run

    assert juice.__all__ == sorted(juice.__all__)
    for name in juice.__all__:
        assert callable(getattr(juice, name)), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        juice.generat  # noqa: B018


def test_importing_the_package_and_the_help_imports_no_torch() -> None:
    code = "import sys, juice, juice.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
