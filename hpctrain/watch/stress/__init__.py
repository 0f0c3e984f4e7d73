"""Whether nodes compute, remember, send and write right, and how quickly: `hpctrain doctor --stress`."""
