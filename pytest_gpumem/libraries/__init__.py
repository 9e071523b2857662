"""Memory that a library takes beside a step: the compiler's, and cuDNN's state of dropout.

A measurement leaves the first out, and renews the second. It may import devices, recording and base
modules.
"""
