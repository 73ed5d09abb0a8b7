"""The routes, one protocol a file: its bodies, what they ask of the engine, its answers."""
