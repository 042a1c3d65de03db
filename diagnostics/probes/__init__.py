"""Probes: each module has a `probe` that looks at one thing and returns a Verdict."""
