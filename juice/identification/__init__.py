"""Finding head sets: which heads steer a model, how strongly, and behind which gate."""
