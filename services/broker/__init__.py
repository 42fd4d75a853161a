"""The memory broker: owns a node's shared tensor memory and the ledger of who holds it."""
