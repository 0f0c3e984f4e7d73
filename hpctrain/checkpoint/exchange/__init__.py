"""Models in and out of the formats of others: Hugging Face, safetensors, tokenizer files."""
