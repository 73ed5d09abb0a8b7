"""Readers of conflict examples: from files, folders and data sets, in the known formats."""
