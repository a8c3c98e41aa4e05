"""Collectives and the entries of their ranks in; who was late, why, since when and at what cost out.

``inferred`` runs the stages in their order. ``steps``, ``pauses`` and ``pipelines`` say what is usual in the
job, ``links`` what the network did, ``bulk`` what was moved beside the collectives, ``waits`` and
``receivers`` what else a rank may have waited for, ``causes`` why it was late. How much longer than its peers
it worked is one table, of collectives (``excess``) and of what stages of pipelines send (``stages``);
``units`` lays that out step by step, ``chance`` says what is beyond chance, ``judgement`` gives one verdict a
rank, which ``coverage`` doubts. ``accounts`` says where a step's time went, and what it would take without a
rank's lateness, on the critical path of its messages (``paths``), ``parallelism`` what groups are for,
``edges`` measures neighbours on one clock.
"""

from dpuflow.verdicts.inferred import Inferred, infer

__all__ = ["Inferred", "infer"]
