"""The `rollplex` command: one file a group of commands, heavy imports inside the commands."""
