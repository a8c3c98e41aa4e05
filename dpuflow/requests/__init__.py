"""Clients' connections in, their requests out: prompt, first answer, tokens, end.

``connections`` tells which TCP connections are clients' (in no collective, no set-up) and who serves;
``find`` cuts them into requests. Nothing is known here of what is wrong: ``findings`` reads this.
"""

from dpuflow.requests.find import Requests, find_requests

__all__ = ["Requests", "find_requests"]
