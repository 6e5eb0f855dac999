"""Drafters: each guesses the next tokens of a sequence; none of them can change the output."""
