"""How each family of models lays an image out in a prompt, and cuts its pixels."""
