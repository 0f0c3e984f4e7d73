"""What looks at a run and never changes it: watchdog, stragglers, status, progress, log, metrics, folder."""
