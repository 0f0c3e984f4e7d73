"""What a deck will cost, told from the deck alone."""
