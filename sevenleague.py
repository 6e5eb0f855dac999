"""Public face."""
