"""Observers of a run, which never change it: stragglers, status, progress, log, metrics, run folder."""
