"""Plug-ins for training tools, one module a tool. Nothing here is imported by the rest of routeguard."""
