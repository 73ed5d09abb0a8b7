"""The report of an evaluation: one HTML page from its stored results."""
