"""Bytes of one vantage in, PACKET columns out, block by block; no protocol above the headers is known."""
