"""Division of a user's module into pipeline stages at block boundaries."""
