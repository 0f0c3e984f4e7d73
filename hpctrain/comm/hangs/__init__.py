"""Detection of hangs: a watchdog on every rank, reports of where ranks are, and the diagnosis."""
