"""Tables of one capture kept as column files; analysing them equals analysing the packets."""
