"""Models: transformers, mixtures of experts, and modules that users bring."""
