"""How the bundled model `mini` was made: facts, relations, corpus, training, measurement."""
