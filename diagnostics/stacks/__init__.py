"""What every thread of a process is doing, taken by py-spy, and which one is to blame."""
