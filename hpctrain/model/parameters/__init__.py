"""Parameters of a model: initial values, patterns of names, and freezing."""
