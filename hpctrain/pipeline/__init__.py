"""Pipeline schedules as data, and their executor."""
