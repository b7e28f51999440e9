"""What the monitor and its analyses cost, each a script of its own."""
