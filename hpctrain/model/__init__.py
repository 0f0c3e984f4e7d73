"""The transformer, made from parallel layers."""
