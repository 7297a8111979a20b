"""Every setting."""
