"""Reductions of gradients that send fewer bytes.

`communication.compress` chooses the GradientReduction of each bucket, with `layout.zero` 0 and 1. It
compresses what a rank has: pipeline and tensor ranks compress their own pieces. A block of 256 elements
begins at the first element of each parameter, so results do not depend on the division into buckets. What a
rank does not send is its residual, which it adds in the next step (error feedback). Checkpoints store the
residuals, and another number of ranks continues with their sum.

Bytes that a rank sends in a step, for N fp32 parameters on R ranks:

| form | to owners | back | state of a rank |
|---|---|---|---|
| none | 8 N in one all-reduce | | |
| bf16 | 2 N (R-1)/R | 2 N | 4 N + 4 N/R |
| int8 | (N + N/64) (R-1)/R | N + N/64 | 4 N + 4 N/R |
| sign | (N/8 + N/64) (R-1)/R | N/8 + N/64 | 4 N + 4 N/R, or none without error feedback |
| onebit | the same, of Adam's momentum | the same | 8 N + 4 N/R |
| topk | 8 R ratio N in one all-gather | | 4 N, or 8 N with momentum |
| powersgd | 8 r (rows and vectors) | 8 r (columns) | 4 N + 4 r (columns) |

`compressed_reduction` sends codes (`codecs`) to the owner of each block, sums there in the order of ranks,
and gathers the coded sums. `majority`, `one_bit`, `top_k` and `power` are the other forms.
`hierarchical_reduction` sums exactly inside a node and compresses between nodes; `warm_up` sums exactly in
the first updates.

A new form is a GradientReduction with a case in `methods` and a table in `deck/sections/communication.py`.
The plan counts its bytes by running it on groups that only record.
"""
