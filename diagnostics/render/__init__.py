"""Ways to show a Verdict; each takes the same value and none computes anything."""
