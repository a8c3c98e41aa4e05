"""Collectives and the entries of their ranks in; who was late, why, since when and at what cost out.

``inferred`` runs the stages in their order: ``links`` and ``causes`` say why a rank was late, ``steps``,
``persistence``, ``pauses``, ``pipelines``, and ``stages`` what is usual in the job, ``bulk`` and
``pages`` find transfers beside the collectives, ``costs`` says what counts as late and what it costs,
``network_delay`` for how long the network may have kept ranks, ``excess`` what they answer for, less what is
chance, ``units`` lays that out step by step, ``judgement`` (doubted by ``partial_capture`` and ``coverage``)
gives a verdict a rank, ``receivers`` who is slow to receive, ``accounts`` says where a step's time went, and
what it would take without a rank's lateness, on the critical path of its messages (``paths``),
``parallelism`` says what groups are for, ``edges`` measures neighbours on one clock, ``phases`` cuts rings.
"""

from dpuflow.verdicts.inferred import Inferred, infer

__all__ = ["Inferred", "infer"]
