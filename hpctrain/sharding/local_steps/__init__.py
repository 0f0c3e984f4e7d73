"""Replicas that diverge for some steps, and the exchange of their weights.

With `layout.local_steps`, replicas sum no gradients. Each makes optimizer steps of its own, and every few
steps `LocalSteps` (`local_steps.py`) brings their weights together: Local SGD, post-local SGD or DiLoCo.
Streaming DiLoCo exchanges one fragment of the model after another. `fragments.py` says which elements belong
to a fragment, and after which updates it is exchanged. `outer_format.py` sums weight differences in 32, 16, 8
or 4 bits.
"""
