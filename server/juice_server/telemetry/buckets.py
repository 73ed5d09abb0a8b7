"""The bounds of histograms' buckets."""

from __future__ import annotations

LATENCIES_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120, 300),
)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
