"""The benchmarks: each prints a table and ends with one JSON line."""
