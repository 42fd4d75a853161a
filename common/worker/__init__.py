"""What the four services that take part in a step have in common."""
