"""Conversion of DeepSpeed configurations and Megatron-LM arguments to input decks (`hpctrain deck --from`).

`shell_script` reads arguments from scripts, `rule_table` turns options into deck keys by the tables
deepspeed.toml and megatron.toml, and `deck_text` writes the deck. `layer_lists` reads lists of layers in
Python's notation. A new option is a row of a table.
"""
