"""These tests need vLLM, which lives in an environment of its own (`make test-vllm`)."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs these tests")
