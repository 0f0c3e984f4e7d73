"""Choice of the kernels that check the matrix products of a run.

All ranks make the same checks, but they may compute them with different kernels.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from hpctrain.comm.world import World
from hpctrain.engine.choices.function_choice import libraries_of_nodes
from hpctrain.fault_checks.audit_kernels import AuditKernels, CompiledAuditKernels, agree
from hpctrain.fault_checks.matmul_audit import MatmulAudit
from hpctrain.host.c_libraries import CompilerError, build_packaged_library, open_library
from hpctrain.host.device import on_host
from hpctrain.parallel.layer_context import LayerContext

_PACKAGE = "hpctrain.fault_checks"


def with_matmul_audit(layer_context: LayerContext, world: World, seed: int) -> LayerContext:
    """Return a layer context whose matrix products are checked. Collective over all ranks."""
    audit = MatmulAudit(seed, world.rank, lambda: world.ledger.phase, _choose_kernels(world))
    return replace(layer_context, products=replace(layer_context.products, audit=audit))


def _choose_kernels(world: World) -> AuditKernels:
    """Return compiled kernels if ranks compute on CPUs and can compile them, else torch's. Collective.

    One rank of each node compiles them. torch's kernels are slower.
    """
    content = None
    if on_host(world.device) and world.local_rank == 0:
        with suppress(CompilerError):
            content = build_packaged_library(_PACKAGE, "audit.c", "audit_library.py")
    content = libraries_of_nodes(world, content).get(world.node)
    if content is not None:
        with suppress(OSError, AttributeError):
            kernels = CompiledAuditKernels(open_library(content))
            if agree(kernels, AuditKernels()):
                return kernels
    return AuditKernels()
