"""One HTML file that tells of runs, and asks no other machine for anything."""
