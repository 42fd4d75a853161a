"""What SGLang imports to take prompts; it looks through all modules of this package."""
