"""Rehearsal of a step of a large job: the calls of all ranks are generated and matched, without ranks."""
