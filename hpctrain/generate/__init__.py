"""Generation of text by a trained model."""
