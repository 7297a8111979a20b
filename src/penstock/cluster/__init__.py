"""What connects the parts: links, dispatch, the supervision of local processes."""
