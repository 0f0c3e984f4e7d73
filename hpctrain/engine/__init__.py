"""Construction of the objects that compute from a deck: groups, model, buckets and optimizer."""
