"""The embedded engine: many requests, each steered its own way, share every forward pass."""
