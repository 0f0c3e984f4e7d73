"""Expert parallelism: the experts of a mixture, spread over ranks (GShard, arXiv 2006.16668).

A router chooses a few experts for each token. `dispatch.py` copies the row of a token once for each of its
experts and exchanges the copies, so that each rank has the rows of its own experts. `expert_layer.py` has
the experts: two products with an activation in between, which `grouped_products.py` computes for the rows of
all experts of a rank. The results are exchanged back and summed with the router's weights.
"""
