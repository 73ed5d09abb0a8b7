"""The `juice` command: one file per command; errors become one line and an exit code."""
