"""A backward pass that keeps autograd's thread for a device busy until an event is set."""

import threading

from helpers.warm import HANGS


def busy_backward(index=0, hold=lambda: None):
    """Start the backward pass in a thread; return that thread, and the event that ends the pass.

    ``hold`` returns an object that autograd's thread keeps alive until then.
    """
    import torch

    begun, go = threading.Event(), threading.Event()

    class Works(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            held = hold()
            begun.set()
            assert go.wait(HANGS)
            del held
            return grad

    def backward():
        Works.apply(torch.ones(4, device=f"cuda:{index}", requires_grad=True)).sum().backward()

    caller = threading.Thread(target=backward)
    caller.start()
    assert begun.wait(HANGS)
    return caller, go
