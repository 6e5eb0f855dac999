"""Drafters: ways of guessing the next tokens. Each is chosen by its section of the job file (see `build`)."""
