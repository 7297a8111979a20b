"""What connects front ends and workers: dispatch, the pool of links, stores, supervision."""
