"""The routes, one concern a file."""
