"""Where: checkpoint files, the host arena of expert records, device slots and who lives in them, KV pages."""
