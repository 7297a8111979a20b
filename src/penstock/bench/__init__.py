"""`penstock bench`: load, verification and report. It knows the server only through HTTP, as any client."""
