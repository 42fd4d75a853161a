"""Ways to run the services: on one machine, in containers, on a cluster."""
