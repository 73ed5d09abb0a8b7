"""Helpers that test files share: oracles, tiny models, servers and requests."""
