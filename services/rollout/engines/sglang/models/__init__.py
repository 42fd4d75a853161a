"""Models that SGLang takes in place of its own; it looks through all modules of this package."""
