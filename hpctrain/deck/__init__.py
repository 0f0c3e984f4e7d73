"""The input deck: read from TOML, validated as a whole, frozen, printed back with every default.

Nothing here imports torch or MPI, so that a mistake in a deck is reported within a second.
"""
