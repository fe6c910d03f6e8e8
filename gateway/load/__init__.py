"""The open-loop load generator and the benches that use it."""
