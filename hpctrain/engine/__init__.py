"""From a deck to the objects that compute: model, buckets, optimizer, groups."""
