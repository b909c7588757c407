"""What about this machine and installation would keep a run from working well, found before one starts."""
