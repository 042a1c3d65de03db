"""One page with everything that `dflash-diag all` found, to attach to an issue."""
