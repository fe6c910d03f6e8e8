"""A small shop of invented things, to try recommendations on. Titles and texts are our own."""
