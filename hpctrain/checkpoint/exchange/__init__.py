"""Import and export of models in the formats of Hugging Face `transformers`, safetensors and `peft`.

Names, layers and tensors of hpctrain are called native. Ranks share the work, and each one has one piece of a
tensor in memory at a time. An imported model is exported again bit for bit.

- `convert` imports and exports models (`hpctrain import`, `hpctrain export`).
- `source` reads initial weights (`model.from`) from a Hugging Face folder or a checkpoint.
- `hugging_face` converts a config.json to a ModelShape and back, and finds where the elements of native
  tensors are in files. For example, a native tensor `experts.gate_up.weight` [experts, 2, expert_mlp, hidden]
  holds what most files have in two matrices for each expert.
- `safetensors_folder`, `model_files` and `tokenizer_files` read and write files.
- `quantization` reads quantized weights as bf16, with `mxfp4` and `fp8_blocks`.
- `prediction_modules` reads and writes modules of multi-token prediction.
- `merge` and `peft` export adapters, `upcycle` initializes a mixture of experts from a dense model, and
  `by_name` reads the weights of a user's module.
- `size_causes` finds the keys of a config.json that contradict the tensors, for messages.

Models of `transformers` that hpctrain does not implement are trained by their own modules and have their own
names. `module_source` derives their keys of a deck, `module_tensors` and `assembled_tensor` find the elements
of each tensor of the module in files, and `module_exchange` imports and exports them.

A new architecture is a `ModelType` in a module of `deck/families/`: names, default sizes, and settings that
must have a fixed value.
"""
