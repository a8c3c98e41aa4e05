"""Wire formats as tables: packet headers, NCCL on the wire."""
