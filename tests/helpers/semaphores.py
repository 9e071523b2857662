"""A skip of tests whose programs use semaphores: multiprocessing's queues and data loaders."""

import multiprocessing

import pytest


def need_semaphores():
    """Skip the test where a process can make no semaphore, as with a read-only /dev/shm."""
    try:
        multiprocessing.get_context("spawn").Lock()
    except (OSError, ImportError) as error:
        pytest.skip(f"needs semaphores of multiprocessing, for which /dev/shm is writable: {error}")
