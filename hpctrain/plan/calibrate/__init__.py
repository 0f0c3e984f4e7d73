"""The rates of the machine that these ranks are on, measured by all of them at once."""
