"""What a model is trained for: from its last hidden states to losses."""
