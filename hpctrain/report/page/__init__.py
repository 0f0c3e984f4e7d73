"""Report page: one HTML file about runs, which loads nothing from other files or machines."""
