"""gRPC between processes: one server, one kind of channel, errors that keep their type."""

from common.transport.channel import Channel, open_channel
from common.transport.server import BoundServicer, GrpcServer, Health, serve

__all__ = ["BoundServicer", "Channel", "GrpcServer", "Health", "open_channel", "serve"]
