"""Command line: one module per verb, which parses arguments, calls one function and prints the result."""
