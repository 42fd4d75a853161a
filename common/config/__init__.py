"""Configuration: frozen models, TOML loading, the environment, and the deployment of one node."""
