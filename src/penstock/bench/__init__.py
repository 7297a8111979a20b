"""`penstock bench`: load, verification and report. A client like any other: it knows the server through HTTP alone."""
