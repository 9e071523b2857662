"""Skip tests whose programs use semaphores, as multiprocessing's queues and data loaders do."""

import multiprocessing

import pytest


def need_semaphores():
    """Skip the test if no semaphore can be created, for example with a read-only /dev/shm."""
    try:
        multiprocessing.get_context("spawn").Lock()
    except (OSError, ImportError) as error:
        pytest.skip(f"needs semaphores of multiprocessing, for which /dev/shm is writable: {error}")
