"""Data sets out of finished outputs, in the forms that trainers read. Nothing here needs a model or a tokenizer."""
