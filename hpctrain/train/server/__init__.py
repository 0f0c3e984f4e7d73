"""A run whose parameters live on servers: what workers and servers do, and how they agree."""
