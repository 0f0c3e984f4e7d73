"""Rewards of completions: comparison with an answer, a regular expression, or a function of the user."""
