"""Floor 5, looking back: the rows of a run and the pictures made from them."""
