"""A run with parameter servers: loops of servers and workers, their messages, and what is computed when.

The first ranks are servers, which own shards of parameters and optimizer state as with ZeRO-3. The other
ranks are workers with the whole model and no state. A worker pulls parameters, computes the gradients of a
share of the samples, and pushes them. As many pushes as there are workers count as one step.

`server_loop` and `worker_loop` have the loops. `share_assignment` decides who computes which share, and
`push_queue` when pushes and pulls are served: both by events alone, so tests drive them without ranks.
`server_messages` has the small messages (`comm/mailbox.py`), and `wire_format` transfers parameters and
gradients. `update_log` counts steps and staleness. `server_trainer` makes steps until all ranks meet: for an
evaluation, a checkpoint, the end or a request.

A worker has at most one push in flight, and a server at most workers x (`staleness` + 1). With the mode
"sync" the bits are those of the same number of data ranks.

Another correction of stale gradients is a value of `correction` in `deck/sections/server.py` and its formula
in `server_loop`.
"""
