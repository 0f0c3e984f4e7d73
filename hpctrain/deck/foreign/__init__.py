"""Decks from what other programs are told: DeepSpeed and Megatron-LM."""
