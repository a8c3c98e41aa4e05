"""``dpuflow top``: who is late now, on a terminal.

In: an agent's answers, or results. Out: a screen of text that a terminal shows, or a line a second. The
standard library's curses drives the terminal, no framework: it draws any terminal over ssh, with colours or
without, costs nothing to start on a card, and a screen here is a list of lines that tests compare.
"""
