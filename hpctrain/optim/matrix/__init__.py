"""Optimizers that update whole matrices (Muon, Adafactor, Adam-mini), and how ranks share the work.

A `MatrixRule` needs a matrix as a whole, while a layout may leave a rank with a part of the matrices, or with
a part of each matrix. Three cases differ in who holds what. In all of them a matrix is transformed as a
whole, so that for the same gradients every layout computes the same bits.

Example: three ranks have the matrices A, B, C, D and E, whose transformations take 90, 80, 70, 60 and 50
FLOPs.

**Data ranks with ZeRO.** `UpdateLoads` (`sharding/ownership.py`) cuts the bucket between matrices, so that
the largest load is as small as possible. Each rank has the reduced gradients and the state of its matrices,
and updates them (`LocalMatrices`). The new parameters are gathered as with any slice of a bucket.

    ========  =======  =======  =======
    rank      0        1        2
    ========  =======  =======  =======
    owns      A        B, C     D, E
    FLOPs     90       150      110
    ========  =======  =======  =======

**Data ranks without ZeRO.** All ranks hold all matrices and their state. Each rank transforms the matrices of
the same share as above. Then an all-gather brings the transformed directions to the others
(`ReplicatedMatrices`), and each rank updates all weights.

**Tensor ranks.** Each rank holds a third of every matrix. A `MatrixExchange` assigns at most one matrix to
each rank in each round. The largest ones come first, and the rank that has the least work so far receives the
largest matrix of a round.

    ========  =======  =======  =======
    rank      0        1        2
    ========  =======  =======  =======
    round 1   A        B        C
    round 2   idle     E        D
    FLOPs     90       130      130
    ========  =======  =======  =======

In round 1, an all-to-all sends the pieces of A to rank 0, those of B to rank 1, and those of C to rank 2.
Each rank assembles its matrix, transforms it and splits the result. A second all-to-all returns the pieces:
now every rank holds its piece of the transformed A, B and C. The pieces of round 2 are sent while the
matrices of round 1 are transformed, and the results of round 1 return while those of round 2 are transformed
(`ExchangedMatrices`). If the rule has state of cells, such as the row means of Adafactor, all ranks need the
result. Then each of them gathers the matrix and transforms it.

The last case combines with the others. With two data ranks and two tensor ranks, a data rank is assigned half
of the matrices, and its two tensor ranks exchange pieces of these. So each of the four ranks transforms a
quarter.
"""
