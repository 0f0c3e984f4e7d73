"""Detection of silent faults in messages and in sums over ranks, for runs whose deck asks for it."""
