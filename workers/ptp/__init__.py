"""Parallel Token Prediction (arXiv 2512.21323): future tokens from one forward, given the noise that will pick them."""
