"""Token files made from text, and the micro-batches of a step that are read from them.

`prepare_text` tokenizes text on all ranks and writes an HDF5 token file (`tokens`), which contains the
tokenizer (`tokenizer`). `order` determines the sequence at each position, and `batches` reads the
micro-batches of a data rank. Both depend only on the seed and the position of a sample, never on the layout.
"""
