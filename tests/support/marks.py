"""Marks that several test files share."""

from __future__ import annotations

import os

import pytest

# Servers of these tests run on vLLM.
ON_VLLM = os.environ.get("JUICE_ENGINE") == "vllm"
NEEDS_CAD = pytest.mark.skipif(ON_VLLM, reason="vLLM cannot couple two prompts")

# Warnings that an evaluation on a few examples always gives.
FEW_EXAMPLES = pytest.mark.filterwarnings(
    "ignore:.*(tune the betas|choose betas|cannot be scored|is left out|no validation example|no"
    " head raises|not recognised).*:UserWarning"
)
