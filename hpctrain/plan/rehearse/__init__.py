"""Rehearsal of a step of a large job: the calls of all ranks are generated and matched, without ranks.

In the order of a rehearsal:

1. `rehearsal` is what verbs call: it generates the programmes, checks them, and compares memory.
2. `rank_programmes` generates the programmes of all ranks (`programme`), one for ranks that make the same
   calls. `rank_signature` finds these ranks, also by their shares of buckets (`bucket_shares`).
3. `rank_step` records the programme of one rank from the executor, buckets and optimizer of the run. The mesh
   of `call_recorder` reports all calls. `recorded_operations` replays the layers, which run once on torch's
   device "meta"; `meta_op_cache` and `expert_loads` compute their results. `audit_messages` adds the messages
   of the check for silent faults.
4. `checks/` matches sends with receives and collective calls with each other, and simulates the order in
   which they complete. Each difference is a RehearsalFault (`fault`). `memory_peaks` adds stages that need
   too much memory.
"""
