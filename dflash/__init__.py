"""Train DFlash block-diffusion drafters in threads, with no failure left silent."""

__version__ = "0.1.0"
