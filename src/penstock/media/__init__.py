"""Images: fetched, decoded and checked once, named by their content, prepared for the model."""
