"""Training objectives: from the last hidden states of a model to losses and metrics."""
