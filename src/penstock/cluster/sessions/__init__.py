"""Sessions of this front end."""
