"""``--html``: the result as one page that needs no network: mailed, opened from a ticket, printed.

In: an ``Analysis``. Out: HTML with its style and pictures in it. Pictures are SVG that is made here, not by a
plotting library in the page: Plotly's smallest bundle alone is 1 MB, uPlot and other small ones draw on a
canvas, which prints as pixels and which no screen reader sees. Here a page works without its script (which
copies filters and reads cells of the heat map), prints sharp, and is as large as what it shows. The
Content-Security-Policy names no origin: style and script are allowed by their hashes, nothing is loaded.
"""

from __future__ import annotations

from dpuflow.reports.html.page import page, write_html

__all__ = ["page", "write_html"]
