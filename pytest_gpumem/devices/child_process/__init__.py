"""The folder that ``gpumem run`` puts on its child processes' PYTHONPATH, for sitecustomize.py."""
