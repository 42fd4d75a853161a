"""All services of one node under a process supervisor: `python -m deploy.local up`."""
