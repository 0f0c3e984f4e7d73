"""Text to token files, and token files to the micro-batches of a step.

`prepare` turns text into one HDF5 token file (`tokens`, with its `tokenizer`), in parallel over the
ranks. `order` says which sequence comes when, and `batches` reads the micro-batches of a data rank:
both are functions of the seed and of the sample's position alone, never of the layout.
"""
