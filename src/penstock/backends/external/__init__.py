"""What engines of others share."""
