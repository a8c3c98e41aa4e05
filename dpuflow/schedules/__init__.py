"""Operations as data: who sends how much to whom, after what.

In: nothing but numbers of ranks and roots. Out: schedules (``algorithms``, ``nccl``), what follows from one
(``graph``), and the arrays that kernels compare with (``plans``). This room knows neither wire nor capture.
"""
