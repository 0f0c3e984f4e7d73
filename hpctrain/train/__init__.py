"""Floor 6, the run: building the objects of a deck, the step, and what a person sees of it."""
