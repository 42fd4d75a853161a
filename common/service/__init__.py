"""What every process does around its work: start, serve, drain, stop."""
