"""`sevenleague bench`: our engine and its peers on the same prompts, in turns."""
