"""One module a report: a result in, text out. Reports format; they do not reason."""
