"""Modules that users bring: any `torch.nn.Module` becomes a ModelPart. README.md has the parts in order."""
