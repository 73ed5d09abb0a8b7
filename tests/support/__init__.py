"""What tests share: oracles, tiny models, servers and requests."""
