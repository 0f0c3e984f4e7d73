"""Modules that users bring: any `torch.nn.Module` becomes a ModelPart, without changes to its code.

The module is a black box with parameters, buffers and a forward method. hpctrain needs to know more about
it: which parameters belong together, what autograd saves, and what passes from block to block. It finds
that by running the module on torch's device "meta". It trains the module by replacing parameters and some
layers in place, so that the user's forward method runs as it is. These are the parts, in the order of a
start:

1. `instantiate` imports the function or class that `model.module` names, and calls it. `causal_model` builds
   a causal language model of `transformers` from its configuration, and derives the other keys from it.
2. `module_call` decides which fields of a micro-batch become which arguments of the module.
3. `module_architecture` builds the module on "meta", finds its blocks, and reports all reasons why it
   cannot be trained as the deck says. The result, a ModuleArchitecture, is what the planner and the engine
   work with.
4. `tensor_parallel/` splits layers over tensor ranks, with `layout.tensor` above 1. `split_plan` reads the
   table of patterns in `model.plan` of the deck, `transformers_plan` the plan that a model of Hugging Face
   has itself. `apply_plan` replaces the layers by those of `parallel_layers`, and `activation_collectives`
   has the collectives between split and complete activations. `unsplit_linear` computes all other linear
   layers with hpctrain's matrix products.
5. `pipeline/` divides the module between blocks, with `layout.pipeline` above 1. `call_order` observes one
   pass on "meta" and finds which tensors pass from block to block. `stage_split` derives what stages send,
   and refuses splits that are impossible. `stage_forward` runs the module's own code on one stage: calls of
   blocks of earlier stages return what arrived from them, and the code is left after the stage's last
   block.
6. `part_contents` replaces the module's parameters by hpctrain's, under their own names, and groups them
   into the layers of `module_layers`: one for each block, one for all else. `module_buffers` allocates the
   buffers.
7. `module_part` is the ModelPart: it gathers parameters, runs a pass, and reports gradients as complete.
8. `initial_values` builds the module once in host memory on each rank, with random numbers that depend on
   `run.seed` alone, and copies the elements that this rank owns.

Example: for a module with `layers.0` to `layers.3` and `blocks = "layers.*"` on two stages, each rank
builds the module on "meta". Stage 1 keeps the parameters of `layers.2` and `layers.3`; those of `layers.0`
and `layers.1` become zeros without memory. In a pass, stage 1 runs the module's forward method from its
beginning. The calls of `layers.0` and `layers.1` return at once: the second one returns the tensor that
stage 0 has sent.

Modules that are not supported raise an HpctrainError that names a remedy. They have blocks that change their
input in place and are recomputed or gathered, blocks that stages do not call once and in order, complex
parameters, or they write to sharded parameters.

To add a style of tensor parallelism, add it to `STYLES` in `split_plan`, its checks to `_rule_problems`,
and its replacement to `apply_plan`.
"""
