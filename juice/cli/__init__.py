"""The `juice` command: one file a command, errors become one line and an exit code here."""
