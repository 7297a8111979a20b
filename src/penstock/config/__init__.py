"""Every setting, declared once: flag, environment variable, file key, check, reference."""
