"""Training with rewards after pretraining, and evaluation on tasks."""
