"""What looks at a run and never changes it: stragglers, status, progress, log, metrics, folder."""
