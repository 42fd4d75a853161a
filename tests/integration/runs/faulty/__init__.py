"""The services as they are, but that two of them can be told to read a wrong bit."""
