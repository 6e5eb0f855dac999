"""The packages of this distribution, which keep plain names and belong into one folder."""

PACKAGES = ("pipeline", "workers", "jobs")
