"""The quickest layouts of a deck that fit into memory, by the plan's own seconds and bytes."""
