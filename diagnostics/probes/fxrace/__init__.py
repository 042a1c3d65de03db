"""`dflash-diag fxrace`: what goes wrong when threads use torch.compile at the same time."""
