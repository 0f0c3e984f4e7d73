"""Sections and tables of a deck: their keys, and below them the checks of these keys."""
