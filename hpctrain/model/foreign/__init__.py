"""Modules that users bring: any `torch.nn.Module` as a Part."""
