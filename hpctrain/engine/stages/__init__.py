"""Pipeline stages of a rank: buckets, gradients, replicas and update rules."""
