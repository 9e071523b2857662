"""Where a step runs: real CUDA GPUs, the virtual GPU, and the cards that it can stand for."""
