"""Compiled kernels for CPUs: the forward of Llama-like decoders over packed rows, in one call per step."""
