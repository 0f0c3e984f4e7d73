"""The machine below the ranks: launchers, the MPI library, memory, processors, processes and their checks."""
