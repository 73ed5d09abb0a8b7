"""The routes, one concern per file."""
