"""Hydra apps: the only place where block management and kernels meet."""
