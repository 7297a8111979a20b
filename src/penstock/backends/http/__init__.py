"""An engine behind HTTP."""
