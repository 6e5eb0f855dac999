"""`make chaos`: jobs whose processes, nodes and storage are made to fail, and a comparison with undisturbed ones."""
