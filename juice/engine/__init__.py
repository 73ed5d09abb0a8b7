"""Engines: the contract in these files, and the two that fulfil it in `own` and `vllm`."""
