"""What is checked of the launcher before a World starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.errors import HpctrainError
from hpctrain.host.launcher import launcher_variables
from hpctrain.host.mpi_library import MPI
from hpctrain.host.srun import describe_missing_pmix, loaded_mpi_libraries


def check_srun(environment: Mapping[str, str]) -> None:
    """HpctrainError, before MPI starts, if srun started ranks that this MPI could not join."""
    lost = describe_missing_pmix(environment, MPI.get_vendor()[0], loaded_mpi_libraries())
    if lost:
        raise HpctrainError(lost)


def check_launcher(environment: Mapping[str, str], size: int) -> None:
    """HpctrainError if the launcher started more processes than this MPI found: silent singletons."""
    for name in launcher_variables(environment)[:1]:
        if int(environment[name]) != size:
            raise HpctrainError(
                f"the launcher started {environment[name]} processes ({name}), but MPI sees a world of "
                f"{size}: mpi4py is built against another MPI ({MPI.get_vendor()[0]}) than the launcher's; "
                "use that MPI's own mpirun, or srun with the matching --mpi"
            )


def check_contradictions(sentences: Sequence[str]) -> None:
    """HpctrainError if there are any: what the launcher's variables say otherwise than MPI, of all ranks."""
    if sentences:
        raise HpctrainError(
            f"the launcher's variables contradict MPI ({sentences[0]}): start all ranks with one launcher, "
            "and neither set nor pass on its variables by hand"
        )
