"""A launch: read, run with a canary in the trainer's place, and looked at after it failed."""
