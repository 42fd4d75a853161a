"""SGLang as the rollout's engine: what runs in the rollout service."""
