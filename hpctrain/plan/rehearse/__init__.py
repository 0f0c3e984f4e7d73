"""A step of a large job, rehearsed: the programme of every rank, matched with those of all others."""
