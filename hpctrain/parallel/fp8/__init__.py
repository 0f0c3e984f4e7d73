"""Matrices in 8 bits an element: formats, scales, recipes, and the product of two of them."""
