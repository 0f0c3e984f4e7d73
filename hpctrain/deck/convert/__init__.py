"""Conversion of DeepSpeed configurations and Megatron-LM arguments to input decks."""
