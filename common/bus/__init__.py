"""The event bus of a node: one hub that gives every event its place, and its clients."""

from common.bus.client import BusClient, HubRestarted
from common.bus.errors import BusRefused, SequenceGap
from common.bus.hub import Hub

__all__ = ["BusClient", "BusRefused", "Hub", "HubRestarted", "SequenceGap"]
