"""The machine on which ranks run: launchers, MPI library, memory, processors, child processes, doctor."""
