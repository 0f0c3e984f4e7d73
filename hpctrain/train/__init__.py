"""Training of a deck: the run, its trainer and steps, checkpoints, and checks and comparisons of runs."""
