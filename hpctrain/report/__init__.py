"""Reports about runs: metrics, plots, traces, HTML pages, and the contents of checkpoints and token files."""
