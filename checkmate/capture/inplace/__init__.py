"""In-place variants of ops: which ops have one, where it is legal, and how it is called."""
