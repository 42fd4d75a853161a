"""Images, and what runs inside them beside the services."""
