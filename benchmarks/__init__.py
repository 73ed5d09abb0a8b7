"""What the project measures: each file prints a table and ends with one JSON line."""
