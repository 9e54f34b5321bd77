"""What can be drawn: one file a kind of operation."""
