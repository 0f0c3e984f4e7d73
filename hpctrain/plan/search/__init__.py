"""Search for the fastest layouts of a deck that fit into memory, by predicted time and memory."""
