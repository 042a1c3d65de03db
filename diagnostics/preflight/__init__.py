"""Before a run: nothing of an earlier one is left, and what the new one needs is there.

A check is a function that returns a `Line`, or none where it does not apply. It says "ok" only if
its look has seen what must be there in any case: a look that was refused is unknown.
"""
