"""Functions that a model may call: how its prompt lists them and its answer names them."""
