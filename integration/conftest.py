"""What holds for every test here: one thread for the tiny models of the servers it starts."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
