"""The folder with sitecustomize.py, which child processes have on their PYTHONPATH."""
