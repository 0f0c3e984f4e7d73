"""Choice of the kernels that check the matrix products of a run.

All ranks make the same checks, but they may compute them with different kernels.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from hpctrain.comm.world import World
from hpctrain.engine.function_choice import libraries_of_nodes
from hpctrain.host.device import on_host
from hpctrain.parallel.kernels.compiler import CompilerError, build_packaged_library
from hpctrain.parallel.kernels.function_library import open_library
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.product_audit.audit_kernels import AuditKernels, CompiledAuditKernels, ErrorBounds
from hpctrain.parallel.product_audit.matmul_audit import MatmulAudit

_PACKAGE = "hpctrain.parallel.product_audit"


def with_matmul_audit(groups: LayerContext, world: World, seed: int) -> LayerContext:
    """Return a layer context whose matrix products are checked. Collective over all ranks."""
    audit = MatmulAudit(seed, world.rank, lambda: world.ledger.phase, _passes(world))
    return replace(groups, products=replace(groups.products, audit=audit))


def _passes(world: World) -> AuditKernels:
    """Return compiled kernels, built once on each node with CPUs, or else torch's, which are slower."""
    content = None
    if on_host(world.device) and world.local_rank == 0:
        with suppress(CompilerError):
            content = build_packaged_library(_PACKAGE, "audit.c", "audit_library.py")
    content = libraries_of_nodes(world, content).get(world.node)
    if content is not None:
        with suppress(OSError, AttributeError):
            passes = CompiledAuditKernels(open_library(content))
            if agree(passes, AuditKernels()):
                return passes
    return AuditKernels()


def agree(one: AuditKernels, other: AuditKernels) -> bool:
    """Return True if two kinds of kernels have the same results on a few numbers, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    values: list[list[torch.Tensor]] = [[], []]
    for rows, columns in ((9, 70), (4, 64)):
        matrix = torch.randn(rows, columns, generator=generator)
        along, across = torch.randn(columns, generator=generator), torch.randn(rows, generator=generator)
        for form in (torch.float32, torch.bfloat16):
            for passes, results in zip((one, other), values, strict=True):
                sums = [torch.ones(columns), torch.ones(columns)]
                passes.add_columns(matrix.to(form), across, across.square(), *sums)
                worst = torch.zeros(())
                there = across + torch.linspace(0, 1, rows)
                bounds = ErrorBounds(columns, rows, form, form, 2, uniform=True)
                passes.judge(bounds, across, there, across.square(), there.square(), worst)
                results += [
                    *passes.rows(matrix.to(form), along, along.square()),
                    *passes.rows(matrix.to(form), along),
                    *passes.checksums(matrix.to(form), along, across),
                    *sums,
                    worst,
                ]
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(*values, strict=True))
