"""Peers of dpuflow's reader, one small program each: read a capture's fields into one checksum."""
