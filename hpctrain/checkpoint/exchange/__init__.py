"""Models in and out of the formats of others: Hugging Face, safetensors, tokenizer files.

Both directions pass through one piece of a tensor at a time, and ranks share the work: `source` opens what
`model.from` names, the package `hugging_face` turns a config.json into a ModelShape and back and names
tensors, `convert` renames and cuts tensors, and `safetensors_folder`, `model_files` and `tokenizer_files`
read and write files. `quantization` reads quantized weights as bf16, with `mxfp4` and `fp8_blocks`. An
imported model is exported again bit for bit. Experts are one tensor here (`experts.gate_up.weight`
[experts, 2, expert_mlp, hidden]) and separate matrices there. Multipliers of muP are folded into weights.

`upcycle` makes a mixture of experts of a dense model, `merge` and `peft` export adapters, and `by_name` reads
the weights of a user's module. `prediction_modules` reads and writes modules of multi-token prediction.
`size_causes` finds the key of a config.json that contradicts the tensors, for messages.

Models of `transformers` that are not built in keep their own names. `module_source` derives their keys of a
deck, `module_tensors` and `assembled_tensor` find which box of which file each tensor of the module is, and
`module_exchange` imports and exports them.

A new architecture is a `ModelType` in a module of `deck/families/`: names, default sizes, and settings that
must have a fixed value.
"""
