"""Six tiny services, placed as the real ones are."""
