"""The environment that code runs in, as a fingerprint that two places can be compared by."""
