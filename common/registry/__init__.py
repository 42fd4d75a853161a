"""Redis: which services live, and what has to outlive a process."""
