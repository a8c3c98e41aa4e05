"""A terminal, by curses: draws what ``screen`` says, and turns keys into a ``View``.

One thread looks, this one draws: a source that is slow or away holds up no key.
"""

from __future__ import annotations

import base64
import curses
import locale
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from dpuflow.reports.top.screen import SORTS, View, screen
from dpuflow.reports.top.seen import Seen, line_of

if TYPE_CHECKING:
    from dpuflow.reports.top.sources import Source

STEP_MS: Final = 200
ESCAPE: Final = 27


class Looking:
    """What a source says, fetched every ``every_s`` by a thread of its own."""

    def __init__(self, source: Source, every_s: float) -> None:
        self.seen = Seen("", health=("connecting",))
        self._source, self._every_s, self._end = source, every_s, threading.Event()
        self.failed: BaseException | None = None
        threading.Thread(target=self._run, name="dpuflow-top", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                self.seen = self._source.look()
                self._end.wait(self._every_s)
        except BaseException as error:
            self.failed = error

    def close(self) -> None:
        """Look no more."""
        self._end.set()


def plain(source: Source, every_s: float, count: int | None = None) -> None:
    """A line each time: for pipes, logs and screen readers. ``count`` lines, None: without end."""
    number = 0
    while count is None or number < count:
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line_of(source.look())}\n")
        sys.stdout.flush()
        number += 1
        if number != count:
            time.sleep(every_s)


def full(source: Source, every_s: float, colour: bool) -> None:
    """The whole terminal, until q."""
    locale.setlocale(locale.LC_ALL, "")
    looking = Looking(source, every_s)
    try:
        curses.wrapper(_run, looking, colour)
    except KeyboardInterrupt:
        pass
    finally:
        looking.close()


def _run(window: curses.window, looking: Looking, colour: bool) -> None:
    view = View(ascii="utf" not in (locale.nl_langinfo(locale.CODESET) or "").lower())
    styles = _styles(colour)
    window.timeout(STEP_MS)
    seen = looking.seen
    drawn: Seen | None = None
    while True:
        if looking.failed is not None:
            raise looking.failed
        seen = seen if view.paused else looking.seen
        if seen is not drawn:
            height, width = window.getmaxyx()
            window.erase()
            for row, (text, style) in enumerate(screen(seen, view, width - 1, height)):
                window.addstr(row, 0, text, styles.get(style, 0))
            window.refresh()
            drawn = seen
        try:
            key = window.get_wch()
        except curses.error:
            continue  # nothing was pressed
        view.note, drawn = "", None
        if key == curses.KEY_RESIZE:
            curses.update_lines_cols()
        elif not pressed(view, key, seen):
            return


def pressed(view: View, key: int | str, seen: Seen) -> bool:
    """Take one key in; False: that was all."""
    if view.typing:
        _typed(view, key)
        return True
    steps = {
        curses.KEY_DOWN: 1,
        "j": 1,
        curses.KEY_UP: -1,
        "k": -1,
        curses.KEY_NPAGE: 10,
        curses.KEY_PPAGE: -10,
    }
    if key in steps:
        view.chosen = max(view.chosen + steps[key], 0)
    elif key in ("q", "Q"):
        return False
    elif key == "s":
        view.sort = SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)]
    elif key == "/":
        view.typing, view.filter = True, ""
    elif key in ("p", " "):
        view.paused = not view.paused
    elif key in ("\n", "\r", curses.KEY_ENTER):
        view.opened = not view.opened
    elif key in (chr(ESCAPE), ESCAPE):
        view.opened, view.filter = False, ""
    elif key == "c":
        view.note = _copy(view.filter_to_copy(seen))
    return True


def _typed(view: View, key: int | str) -> None:
    """A filter is being written."""
    if key in ("\n", "\r", curses.KEY_ENTER):
        view.typing = False
    elif key in (chr(ESCAPE), ESCAPE):
        view.typing, view.filter = False, ""
    elif key in (curses.KEY_BACKSPACE, "\b", "\x7f"):
        view.filter = view.filter[:-1]
    elif isinstance(key, str) and key.isprintable():
        view.filter += key


def _copy(text: str | None) -> str:
    """Into the clipboard of the terminal that one sits at (OSC 52), over ssh too where it allows that."""
    if text is None:
        return "no finding has a filter"
    sys.stdout.write(f"\033]52;c;{base64.b64encode(text.encode()).decode()}\a")
    sys.stdout.flush()
    return text


def _styles(colour: bool) -> dict[str, int]:
    """Styles by name; without colours what is bad is bold."""
    styles = {"title": curses.A_REVERSE, "bad": curses.A_BOLD, "warn": 0, "quiet": 0}
    curses.curs_set(0) if curses.tigetstr("civis") else None
    if colour and curses.has_colors():
        curses.use_default_colors()
        for number, colour_of in ((1, curses.COLOR_RED), (2, curses.COLOR_YELLOW)):
            curses.init_pair(number, colour_of, -1)
        styles |= {
            "bad": curses.color_pair(1) | curses.A_BOLD,
            "warn": curses.color_pair(2),
            "quiet": curses.A_DIM,
        }
    return styles
