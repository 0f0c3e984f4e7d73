"""Schedules as data, and their executor."""
