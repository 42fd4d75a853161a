"""Weight layouts: where each parameter lies in a flat buffer, and models bound to such buffers."""
