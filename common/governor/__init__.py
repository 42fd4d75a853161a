"""How many SMs background work may fill while sequences decode."""
