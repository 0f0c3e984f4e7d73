"""How long a step of a deck takes on a machine, by cause."""
