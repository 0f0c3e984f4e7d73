"""Reading of decks: keys of files and arguments, old keys, defaults that depend on other keys, validation."""
