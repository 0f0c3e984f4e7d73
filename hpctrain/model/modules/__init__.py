"""Modules that users bring: any `torch.nn.Module` as a ModelPart.

The module is built once on every rank in host memory, under random numbers of `run.seed` (`initial`), after
`find` has turned the name in the deck into a function. Its parameters then become parameters of hpctrain in
place, under their own names (`part`, `layers`, `holding`, `buffers`). Before that, `architecture`, `on_meta`,
`trace` and `twin` run it on torch's device "meta" to find its parameters, saved activations and FLOPs.

Tensor plans, of the user (`plan`) or of transformers (`own_plan`), replace layers (`split`, `parallel`,
`experts`, `across`). For a pipeline, `order` and `structure` observe one pass without values, and `cut`
divides the module. A stage runs the module's own code (`passage`): calls of blocks of other stages return
what arrived from them. `arguments` (ModuleCall) turns the fields of a micro-batch into arguments.

These are errors: blocks that change their input in place, if they are recomputed or gathered; writing into
sharded parameters; complex parameters; blocks of stages that are not called once and in order.

A new style of tensor plans belongs in `STYLES` of `plan`, and its layer in `split`.
"""
