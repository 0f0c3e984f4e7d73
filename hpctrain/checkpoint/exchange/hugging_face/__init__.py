"""Models in config.json files of Hugging Face's `transformers`, and the names of their tensors.

`config_reader` turns a config.json into a ModelShape, and `config_writer` turns a shape into a config.json.
`export_choice` finds the architecture for the export of a shape, or the reason why there is none. All use
`architectures`, the rows of the table of families with the names of their tensors. `tensor_names`
and `expert_order` say where the elements of our tensors are in those of a file.
"""
