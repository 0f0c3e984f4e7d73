"""Meshes, pipeline splits and dedicated ranks: where ranks, layers and models go."""
