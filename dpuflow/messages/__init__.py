"""Blocks of packets in, FLOW and MESSAGE rows of one capture out.

``roce`` follows queue pairs by PSN, with ``pairing`` (which flow answers which), ``roles`` (NCCL's
clear-to-send entries) and ``sends`` (what MPI libraries write into SENDs); ``tcp`` follows streams by
sequence number, with ``hidden`` (headers beyond the snap length: ``hidden_gloo``, ``ob1``, ``hidden_ob1``,
over ``stretches``). ``retained`` lets both run for weeks.
"""
