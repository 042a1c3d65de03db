"""Diagnoses threaded training runs and how they are launched. Never imports torch itself."""
