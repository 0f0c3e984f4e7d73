"""Experts of a mixture: the exchange of rows between ranks, and their grouped products."""
