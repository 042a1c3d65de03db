"""Which files will run, or do run, in a given place: compared with those that are meant to."""
