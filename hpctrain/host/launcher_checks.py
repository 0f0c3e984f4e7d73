"""What is checked of the launcher before a World starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.errors import HpctrainError
from hpctrain.host.launcher import variables
from hpctrain.host.mpi_library import MPI
from hpctrain.host.srun import loaded_mpis, lost_under_srun


def check_srun(environment: Mapping[str, str]) -> None:
    """HpctrainError, before MPI starts, if srun started ranks that this MPI could not join."""
    lost = lost_under_srun(environment, MPI.get_vendor()[0], loaded_mpis())
    if lost:
        raise HpctrainError(lost)


def check_launcher(environment: Mapping[str, str], size: int) -> None:
    """HpctrainError if the launcher started more processes than this MPI found: silent singletons."""
    for name in variables(environment)[:1]:
        if int(environment[name]) != size:
            raise HpctrainError(
                f"the launcher started {environment[name]} processes ({name}), but MPI sees a world of "
                f"{size}: mpi4py is built against another MPI ({MPI.get_vendor()[0]}) than the launcher's; "
                "use that MPI's own mpirun, or srun with the matching --mpi"
            )


def refuse_contradictions(sentences: Sequence[str]) -> None:
    """HpctrainError if there are any: what the launcher's variables say otherwise than MPI, of all ranks."""
    if sentences:
        raise HpctrainError(
            f"the launcher's variables contradict MPI ({sentences[0]}): start all ranks with one launcher, "
            "and neither set nor pass on its variables by hand"
        )
