"""Parts of the backward pass: autograd functions, saved tensors, deferred weight gradients."""
