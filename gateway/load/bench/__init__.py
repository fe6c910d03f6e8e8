"""Benches: the gateway beside bare servers on the same machine, and on its real models."""
