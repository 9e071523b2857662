"""The devices that steps run on: real GPUs, other accelerators, the virtual GPU and its cards."""
